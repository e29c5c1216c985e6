"""Kernels that layers want compiled before the first request: they say so while they are built (since vLLM 0.30).

Only the model runner listens (``JitWarmupRegistry`` in ``vllm/model_executor/warmup/jit_warmup.py``), and only while it calls the
loader. A module that maps its weights was built earlier, when hit or miss was decided, and nobody heard its layers. So it is noted
what they say, and said again when the runner asks for the model.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

__all__ = ["Wanted", "listening", "say_again"]

Wanted: TypeAlias = "tuple[Any, tuple[Any, ...], dict[str, Any]]"
"""A kernel, and what says in which variants: numbers, dtypes, the engine's config."""

logger = logging.getLogger("vllm.torchwcache")


@contextlib.contextmanager
def listening(vllm_config: Any) -> Iterator[list[Wanted]]:
    """Note what is said inside, and keep it from the runner, who is not to compile for a module that may never serve.

    Args:
        vllm_config: As the runner makes its own registry with.

    Yields:
        What was said, in order; filled at the end.
    """
    wanted: list[Wanted] = []
    registry = _registry(vllm_config)
    with contextlib.nullcontext() if registry is None else registry.activate():
        yield wanted
    if registry is None:
        return
    try:
        wanted += [(kernel, args, kwargs) for kernel, calls in registry._registrations.items() for args, kwargs in calls]
    except (AttributeError, TypeError, ValueError) as error:  # not worth a miss: the same tokens come, the first ones later
        logger.warning("torchwcache: this vLLM notes kernels otherwise (%s): on a hit the first requests compile them", error)


def _registry(vllm_config: Any) -> Any:
    try:
        from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    except ImportError:  # an older vLLM, whose layers say nothing
        return None
    return JitWarmupRegistry(vllm_config)


def say_again(wanted: Iterable[Wanted]) -> None:
    """Tell the runner that is listening. None does where none would from disk: during the load of a draft model, for instance."""
    for kernel, args, kwargs in wanted:
        kernel.register_warmup(*args, **kwargs)
