"""Which versions of vLLM this adapter knows, and whether the places where it plugs in still look as it knows them."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

__all__ = ["NEWEST", "OLDEST", "parse", "seam_problems", "version_note"]

OLDEST, NEWEST = (0, 26), (0, 33)
"""First and last minor version that was run or read; docs/vllm.md says which is which."""

_SEAMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("vllm.model_executor.model_loader", "register_model_loader", ("load_format",)),
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    ("vllm.model_executor.model_loader.base_loader", "initialize_model", ("vllm_config", "prefix", "model_config")),
    ("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader.load_weights", ("model", "model_config")),
    ("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader._prepare_weights", ("model_name_or_path", "revision")),
    ("vllm.model_executor.model_loader.utils", "initialize_model", ("vllm_config", "prefix", "model_config")),
    (
        "vllm.model_executor.model_loader.utils",
        "process_weights_after_loading",
        ("model", "model_config", "target_device"),
    ),
    ("vllm.config", "set_current_vllm_config", ("vllm_config",)),
    ("vllm.model_executor.layers.rotary_embedding", "_ROPE_DICT", ()),
    ("vllm.v1.engine.core", "EngineCore.sleep", ("level",)),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", ("method", "timeout", "args", "kwargs")),
    ("vllm.v1.executor.abstract", "Executor.collective_rpc", ("method",)),
)


def parse(version: str) -> tuple[int, int]:
    """Major and minor number; ``(0, 0)`` for a build without one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def version_note(version: str) -> str:
    """What to warn of about a version; empty when it is one of those known."""
    known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    number = parse(version)
    if number < OLDEST:
        return f"vLLM {version} is older than what torchwcache knows ({known})"
    if number > NEWEST:
        return (
            f"vLLM {version} is newer than what torchwcache knows ({known}); it goes on as long as vLLM's own seams look the same"
        )
    return ""


def seam_problems() -> list[str]:
    """What is not where, or not called as, this adapter expects it."""
    problems = []
    for module_name, path, parameters in _SEAMS:
        try:
            found: Any = importlib.import_module(module_name)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            problems.append(f"{module_name}.{path}: {error}")
            continue
        if parameters:
            there = inspect.signature(found).parameters
            problems += [f"{module_name}.{path} takes no {name!r}" for name in parameters if name not in there]
    return problems
