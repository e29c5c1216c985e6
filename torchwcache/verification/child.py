"""One of the two processes of ``torchwcache verify``: gets a model, describes it, says so, and ends. Run as ``python -m``."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
import traceback
from importlib import metadata
from typing import TYPE_CHECKING

import msgspec

import torchwcache
from torchwcache.adapter import CaptureRules
from torchwcache.cli.model_arguments import model_config
from torchwcache.config import ModelConfig, Policy, policies_from
from torchwcache.verification.messages import Answer, Failure, Order

if TYPE_CHECKING:
    from torchwcache.attachment import Attachment

_PACKAGES = ("torch", "transformers", "diffusers", "safetensors", "accelerate", "numpy", "xxhash")
"""Whose versions are told, if the process imported them."""


def main() -> None:
    """Read an order from standard input, write an answer to standard output."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever a model prints must not be taken for an answer
        answer: Answer | Failure
        try:
            answer = carry_out(order)
        except Exception as error:  # the top of the process: whatever it is, the command is to hear it
            kinds = tuple(cls.__name__ for cls in type(error).__mro__)
            answer = Failure(kinds=kinds, text=str(error) or type(error).__name__, trace=traceback.format_exc())
        out.write(msgspec.msgpack.encode(answer))


def carry_out(order: Order) -> Answer:
    """Get the model, describe it, and run it if that was asked for."""
    cfg = model_config(argparse.Namespace(**order.model))
    from torchwcache.adapters import adapter_for
    from torchwcache.verification.describe import describe_module
    from torchwcache.verification.inputs import describe_outputs, inputs_from

    started = time.perf_counter()
    attachment = _attach(cfg, order.socket) if order.side == "attach" else _load(cfg)
    seconds = time.perf_counter() - started
    with attachment as model:
        rules = adapter_for(cfg).rules(cfg, model)
        return Answer(
            description=describe_module(model, rules=CaptureRules(ignore={**rules.ignore, **cfg.ignore})),
            outputs=describe_outputs(model, *inputs_from(order.inputs, model)) if order.deep else {},
            source=attachment.report.source,
            fingerprint=attachment.report.fingerprint,
            slot=attachment.report.slot,
            label=type(model).__name__,
            versions=_versions(),
            seconds=seconds,
        )


def _attach(cfg: ModelConfig, socket: str) -> Attachment:
    """What is cached, or an error: nothing is produced, and nothing falls back to the disk."""
    from torchwcache.attaching import AttachOptions, attach_through_daemon

    policies = policies_from(fallback=Policy.ERROR, environ={})
    return attach_through_daemon(cfg, AttachOptions(socket=socket, start=False, policies=policies, produce=False))


def _load(cfg: ModelConfig) -> Attachment:
    from torchwcache.attachment import AttachReport
    from torchwcache.production import attach_from_disk

    return attach_from_disk(cfg, AttachReport(), requires_grad=False)


def _versions() -> dict[str, str]:
    found = {"torchwcache": torchwcache.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        if name in sys.modules:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
    return found


if __name__ == "__main__":
    main()
