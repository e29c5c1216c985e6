"""What vLLM calls in each of its processes (entry-point group ``vllm.general_plugins``)."""

from __future__ import annotations

import functools
import os
from typing import Any

from torchwcache.errors import RefusedError
from torchwcache_vllm.engine_core import guard_engine_core
from torchwcache_vllm.memory import correct_start_check

__all__ = ["register"]

_MARK = "_torchwcache_checks"


def register() -> None:
    """Make ``--load-format torchwcache`` known. vLLM may call it more than once in a process.

    It must not raise: vLLM starts its other users' engines through here, too.
    """
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from torchwcache_vllm.loader import LOAD_FORMAT, TorchwcacheModelLoader

    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not TorchwcacheModelLoader:
        register_model_loader(LOAD_FORMAT)(TorchwcacheModelLoader)
    correct_start_check()
    guard_engine_core()
    if os.environ.get("TORCHWCACHE_MODE") in ("client", "daemon"):
        _watch_other_loaders()


def _watch_other_loaders() -> None:
    """The cache was asked for by environment: say so loudly where another load format passes it by."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    from torchwcache_vllm.loader import LOAD_FORMAT, TorchwcacheModelLoader, loads_for_us, logger

    original = BaseModelLoader.load_model
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, TorchwcacheModelLoader) and not loads_for_us():
            text = (
                f"TORCHWCACHE_MODE={os.environ.get('TORCHWCACHE_MODE')} asks for the cache, but this engine was started with "
                f"--load-format {self.load_config.load_format} and loads by itself; start it with --load-format {LOAD_FORMAT}"
            )
            if os.environ.get("TORCHWCACHE_FALLBACK") == "error":
                raise RefusedError(text, reason=text, kind="configuration")
            logger.warning("torchwcache: %s", text)
        return original(self, *args, **kwargs)

    setattr(load_model, _MARK, True)
    BaseModelLoader.load_model = load_model
