"""What vLLM calls in each of its processes (entry-point group ``vllm.general_plugins``)."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from torchwcache.errors import RefusedError

__all__ = ["register"]

_MARK = "_torchwcache_checks"

logger = logging.getLogger("vllm.torchwcache")


def register() -> None:
    """Make ``--load-format torchwcache`` known. vLLM may call it more than once in a process.

    vLLM starts its other users' engines through here, too, and catches nothing: what cannot be done on a release that nobody has
    read is said, and left.

    Raises:
        RefusedError: Something cannot be done, and the environment asks for the cache and for an error where it cannot be had.
    """
    _attempt(_register_loader, "`--load-format torchwcache` is not known, and a start that names it stops")
    _attempt(_correct_start_check, "a start whose weights are in the cache may be stopped by vLLM's own check for free memory")
    _attempt(_guard_engine_core, "an engine that is told to sleep at level 2 pauses before it is refused")
    if _asked():
        _attempt(_watch_other_loaders, "nothing will be said when an engine is started with another load format")


def _attempt(part: Callable[[], None], loss: str) -> None:
    try:
        part()
    except Exception as error:  # whatever a change of vLLM's makes of it
        text = f"this vLLM has changed where torchwcache plugs in ({type(error).__name__}: {error}): {loss}"
        if _asked() and os.environ.get("TORCHWCACHE_FALLBACK") == "error":
            raise RefusedError(text, reason=text, kind="configuration") from error
        logger.warning("torchwcache: %s", text)


def _asked() -> bool:
    """Whether the environment asks for the cache."""
    return os.environ.get("TORCHWCACHE_MODE") in ("client", "daemon")


@functools.cache  # once in a process: vLLM warns of a format that is registered again
def _register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader

    from torchwcache_vllm.loader import LOAD_FORMAT, TorchwcacheModelLoader

    register_model_loader(LOAD_FORMAT)(TorchwcacheModelLoader)


def _correct_start_check() -> None:
    from torchwcache_vllm.memory import correct_start_check

    correct_start_check()


def _guard_engine_core() -> None:
    from torchwcache_vllm.engine_core import guard_engine_core

    guard_engine_core()


def _watch_other_loaders() -> None:
    """The cache was asked for by environment: say so loudly where another load format passes it by.

    Looked at where the engine chooses a loader: loaders may load without anything of their base class (tensorizer, for one).
    """
    from vllm.model_executor import model_loader

    original = model_loader.get_model_loader
    if getattr(original, _MARK, False):
        return
    said: set[str] = set()

    @functools.wraps(original)
    def get_model_loader(load_config: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(load_config.load_format), said)
        return original(load_config, *args, **kwargs)

    setattr(get_model_loader, _MARK, True)
    # Model runners import the function by its name; those that were imported before this plugin was loaded have it already.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("get_model_loader") is original:
            module.get_model_loader = get_model_loader  # type: ignore[attr-defined]


def _check_format(load_format: str, said: set[str]) -> None:
    from torchwcache_vllm.loader import LOAD_FORMAT

    if load_format == LOAD_FORMAT:
        return
    text = (
        f"TORCHWCACHE_MODE={os.environ.get('TORCHWCACHE_MODE')} asks for the cache, but this engine was started with "
        f"--load-format {load_format} and loads by itself; start it with --load-format {LOAD_FORMAT}"
    )
    if os.environ.get("TORCHWCACHE_FALLBACK") == "error":
        raise RefusedError(text, reason=text, kind="configuration")
    if load_format not in said:  # an engine asks for its loader several times
        said.add(load_format)
        logger.warning("torchwcache: %s", text)
