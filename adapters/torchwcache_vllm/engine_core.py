"""What would write into shared weights, refused in vLLM's engine core: before it stops serving, and before any worker is asked.

A refusal in the workers comes too late for vLLM. By then it has paused its scheduler for a sleep, and nothing resumes it. It marks
as asleep what it told the workers to discard, whatever they answer. And where several workers fail it reads the first one's answer
only: the others' are then taken for answers to the next call.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from torchwcache_vllm.guards import LOAD_FORMAT, offence_of, refused, shares_weights, wrap

__all__ = ["guard_engine_core"]

logger = logging.getLogger(__name__)


def guard_engine_core() -> None:
    """Look at what is asked of any engine core of this process. Engines without our load format go on as ever.

    It does not raise. Where vLLM has changed, ``torchwcache_vllm.versions`` sees to it that nothing is shared.
    """
    for module_name, class_name, name, before in (
        ("vllm.v1.engine.core", "EngineCore", "sleep", _before_sleep),
        ("vllm.v1.engine.core", "EngineCore", "collective_rpc", _before_call),
        ("vllm.v1.executor.abstract", "Executor", "discard", _before_discard),
    ):
        try:
            # Imported, since this may be the only time that vLLM calls its plugins before it forks into the engine core.
            cls = getattr(importlib.import_module(module_name), class_name)
        except (ImportError, AttributeError) as error:
            logger.debug("no %s.%s to guard: %s", module_name, class_name, error)
            continue
        wrap(cls, name, before)


def _before_sleep(core: Any, *args: Any, **kwargs: Any) -> None:
    _refuse_if_shared(core.model_executor, offence_of("sleep", *args, **kwargs))


def _before_call(core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any) -> None:
    if isinstance(method, str):
        _refuse_if_shared(core.model_executor, offence_of(method, *args, **(kwargs or {})))


def _before_discard(executor: Any, *args: Any, **kwargs: Any) -> None:
    _refuse_if_shared(executor, offence_of("discard", *args, **kwargs))


def _refuse_if_shared(executor: Any, what: str) -> None:
    """Only workers know: whether weights are shared is decided while they load."""
    if what and _is_asked_for(executor.vllm_config) and any(executor.collective_rpc(shares_weights)):
        raise refused(what)


def _is_asked_for(vllm_config: Any) -> bool:
    """Whether the model or its draft is loaded by us. Otherwise the workers need not even have this package."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_load_config", None)
    return any(getattr(config, "load_format", None) == LOAD_FORMAT for config in (vllm_config.load_config, draft))
