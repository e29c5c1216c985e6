"""The hooks: where SGLang asks for a loader, and where it would write into weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from torchwcache_sglang.settings import options_from, split_extra_config

__all__ = ["GET_LOADER", "around_get_model_loader", "register_hooks"]

logger = logging.getLogger("sglang.torchwcache")

GET_LOADER = "sglang.srt.model_loader.loader.get_model_loader"


def register_hooks() -> None:
    """Put them in place; SGLang applies them after all plugins have run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(GET_LOADER, around_get_model_loader, HookType.AROUND)


def around_get_model_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """SGLang's own loader, or ours around it."""
    ours, theirs = split_extra_config(load_config.model_loader_extra_config)
    options = options_from(ours)
    if ours is not None:
        load_config = copy.copy(load_config)
        load_config.model_loader_extra_config = theirs  # SGLang's loaders refuse what they do not know
    inner = original(load_config, model_config)
    if options is None:
        return inner
    from torchwcache_sglang.loader import CacheLoader

    return CacheLoader(inner, options)
