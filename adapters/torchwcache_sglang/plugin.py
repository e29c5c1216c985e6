"""The entry point of SGLang's plugins: registers hooks, imports nothing heavy, never fails an engine that did not ask for us."""

from __future__ import annotations

import logging
import os

__all__ = ["register"]

logger = logging.getLogger("sglang.torchwcache")


def register() -> None:
    """Called by SGLang once in every one of its processes."""
    if os.environ.get("TORCHWCACHE_MODE") == "off":
        return
    from torchwcache_sglang.hooks import register_hooks

    register_hooks()
