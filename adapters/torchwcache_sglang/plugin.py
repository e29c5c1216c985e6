"""The entry point of SGLang's plugins: registers hooks, and says so loudly when it cannot although the cache was asked for."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from torchwcache_sglang.settings import asked_by_environment, stops_on_failure

__all__ = ["LOAD_PLUGINS", "register"]

logger = logging.getLogger("sglang.torchwcache")

LOAD_PLUGINS = "sglang.srt.plugins.load_plugins"

_LOADING = ("sglang.srt.managers.scheduler", "sglang.srt.model_loader.loader")
_NOT_LOADING = ("sglang.srt.managers.detokenizer_manager", "sglang.srt.managers.data_parallel_controller")


def register() -> None:
    """Called by SGLang once in every one of its processes."""
    if os.environ.get("TORCHWCACHE_MODE") == "off":
        return
    if not _may_load():
        if not _loads_nothing():
            _register_later()
        return
    try:
        from torchwcache_sglang.hooks import register_hooks

        register_hooks()
    except Exception as error:
        # SGLang logs what a plugin raises, and goes on without it: an engine that was told to start from the cache would load by
        # itself. Only what is not an ``Exception`` stops it.
        if asked_by_environment():
            text = f"torchwcache was asked for, but cannot be used with this SGLang: {type(error).__name__}: {error}"
            if stops_on_failure():
                raise SystemExit(text) from error
            logger.error("%s; SGLang loads by itself", text)
        raise


def _may_load() -> bool:
    """Whether models may be loaded in this process; where not, hooks would only import what is not needed there.

    Where nobody asked by the environment, a process that has imported no loader yet is left alone: it can still be asked by the
    loader's options, but without a hook SGLang's own loader refuses those, and says so.
    """
    if any(name in sys.modules for name in _LOADING):
        return True
    return asked_by_environment() and not _loads_nothing()


def _loads_nothing() -> bool:
    return any(name in sys.modules for name in _NOT_LOADING)


def _register_later() -> None:
    """Register once SGLang has imported what hooks are on.

    ``sglang serve`` loads plugins before it has looked at its options, and runs each once. It asks for plugins a second time before
    it starts its schedulers, with everything imported, and so does an engine in a script that loaded its plugins first.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    due = True

    def asked_again(result: object, *_: Any, **__: Any) -> None:
        nonlocal due
        if not due or not _may_load():
            return
        due = False
        try:
            register()
            HookRegistry.apply_hooks()
        except Exception:
            # As SGLang does with what plugins raise: an engine that was not told to use the cache goes on without it.
            logger.exception("torchwcache cannot be used with this SGLang")

    HookRegistry.register(LOAD_PLUGINS, asked_again, HookType.AFTER)
