"""The entry point of SGLang's plugins: registers hooks, and says so loudly when it cannot although the cache was asked for."""

from __future__ import annotations

import logging
import os
import sys

from torchwcache_sglang.settings import asked_by_environment, stops_on_failure

__all__ = ["register"]

logger = logging.getLogger("sglang.torchwcache")

_LOADING = ("sglang.srt.managers.scheduler", "sglang.srt.model_loader.loader")


def register() -> None:
    """Called by SGLang once in every one of its processes; only those that load models have something to hook."""
    if os.environ.get("TORCHWCACHE_MODE") == "off" or not any(name in sys.modules for name in _LOADING):
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
