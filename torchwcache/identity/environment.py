"""What the finished bytes, or the meaning of a manifest, depend on outside the model itself.

torchwcache's own version is not among it: the version of the manifest's layout and the versions of loader and adapter say what
matters, and an upgrade that touches none of them must not empty every cache.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from torchwcache.manifest import MANIFEST_VERSION

__all__ = ["environment_stamp"]


def environment_stamp(
    device: str,
    *,
    packages: Iterable[str] = (),
    env_names: Iterable[str] = (),
    computes: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Collect the environment's part of a fingerprint.

    Options left on ``auto`` are resolved from the environment while a module is built or loaded. What decides them goes in here;
    what they resolved to is in the manifest, where a difference is an error.

    Args:
        device: The entry's device as this process names it, such as ``"cpu"`` or ``"cuda:0"``. Only its kind and capability
            count: the device itself is part of the entry's name.
        packages: Distributions that build or load the module, such as ``transformers`` or ``vllm``; their versions count.
        env_names: Environment variables that the adapter's engine resolves options from.
        computes: Whether loading runs arithmetic (``finalize``, repacking), so that numeric settings count too.
        environ: Where to look them up.
    """
    import torch

    where = torch.device(device)
    return {
        "layout": MANIFEST_VERSION,
        "python": f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}",
        "torch": {"version": str(torch.__version__), "git": torch.version.git_version},
        "device": {
            "kind": where.type,
            "capability": torch.cuda.get_device_capability(where) if where.type == "cuda" else None,
            "runtime": (torch.version.cuda or torch.version.hip) if where.type == "cuda" else None,
        },
        "packages": {name: _version(name) for name in sorted(set(packages))},
        "variables": {name: environ.get(name) for name in sorted(set(env_names))},
        "flags": _flags(computes),
    }


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _flags(computes: bool) -> dict[str, Any]:
    import torch

    flags: dict[str, Any] = {"default_dtype": torch.get_default_dtype()}
    if computes:
        flags["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        flags["deterministic_algorithms"] = torch.are_deterministic_algorithms_enabled()
        flags["flush_denormal"] = bool((torch.tensor([2.0**-140]) * 0.5 == 0).item())
    return flags
