"""The arguments that name a model, and the configuration made of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from torchwcache.config import Identity, ModelConfig, Role
from torchwcache.errors import ConfigError

__all__ = ["add_model_arguments", "model_arguments", "model_config"]

_NAMES = (
    "checkpoint", "build", "build_kwargs", "build_meta", "finalize", "dtype", "device", "override", "quantization", "role",
    "identity", "revision", "trust_remote_code", "no_strict", "seed", "loader", "adapter", "code_version",
)  # fmt: skip


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare CHECKPOINT and everything else that decides a model's bytes."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a Transformers folder or repo id; with --build, safetensors files"
    )
    model = parser.add_argument_group(
        "model", "All of it is part of the model's identity: give what the program gives that will attach."
    )
    model.add_argument("--build", metavar="MODULE:NAME", help="makes the module (the current folder is searched too)")
    model.add_argument("--build-kwargs", metavar="JSON", help="keyword arguments for --build, as a JSON object")
    model.add_argument("--build-meta", metavar="MODULE:NAME", help="makes the module on the meta device, where --build cannot")
    model.add_argument("--finalize", metavar="MODULE:NAME", help="called with the loaded module before it is published")
    model.add_argument("--dtype", help="floating dtype, such as bfloat16 (default: the model's own)")
    model.add_argument("--device", default="cpu", help="where the weights live: cpu, cuda or cuda:N (default: cpu)")
    model.add_argument("--override", action="append", default=[], metavar="NAME=JSON", help="change the model's config; repeatable")
    model.add_argument("--quantization", metavar="METHOD", help="an allow-listed method (default: as the checkpoint says)")
    model.add_argument("--role", choices=[role.value for role in Role], default=Role.TARGET.value, help="default: target")
    model.add_argument("--identity", choices=[kind.value for kind in Identity], default=Identity.FULL.value, help="default: full")
    model.add_argument("--revision", help="revision of a repo id")
    model.add_argument("--trust-remote-code", action="store_true", help="run the checkpoint's own Python files")
    model.add_argument("--no-strict", action="store_true", help="accept missing and unexpected tensor names")
    model.add_argument("--seed", type=int, help="seeds the load")
    model.add_argument("--loader", help="name of a loader (default: chosen by the adapter)")
    model.add_argument("--adapter", help="name of an adapter (default: the one that accepts the model)")
    model.add_argument("--code-version", help="your own version of --build and --finalize, where their source cannot be read")


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that :func:`model_config` reads, as plain values: another process can make the same configuration of them."""
    return {name: getattr(args, name) for name in _NAMES}


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The configuration that the arguments describe.

    Raises:
        ConfigError: A value is wrong.
    """
    if args.build or args.build_meta or args.finalize:
        # `python -m torchwcache` looks for modules in the current folder, the installed command does not.
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return ModelConfig(
        args.checkpoint,
        build=args.build,
        build_kwargs=_object("--build-kwargs", args.build_kwargs),
        build_meta=args.build_meta,
        finalize=args.finalize,
        dtype=args.dtype,
        device=args.device,
        overrides=dict(_pair(item) for item in args.override),
        quantization=args.quantization,
        role=args.role,
        identity=args.identity,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        strict=not args.no_strict,
        seed=args.seed,
        loader=args.loader,
        adapter=args.adapter,
        code_version=args.code_version,
    )


def _object(name: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    value = _json(name, text)
    if not isinstance(value, dict):
        raise ConfigError(f"{name} {text}: expected a JSON object, such as '{{\"hidden\": 64}}'")
    return value


def _pair(item: str) -> tuple[str, Any]:
    name, equals, text = item.partition("=")
    if not name or not equals:
        raise ConfigError(f"--override {item}: expected NAME=JSON, such as rope_theta=1e6")
    return name, _json(f"--override {name}", text)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} {text}: not JSON ({error}); quote strings, as in '\"yarn\"'") from error
