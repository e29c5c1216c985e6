"""Where SGLang would write into weights, or free them, while they are shared: refused in words before anything is done.

Every rank answers alike: what they do together (barriers, broadcasts) they must refuse together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torchwcache_sglang import leases

__all__ = [
    "CALLER_GUARDS",
    "GUARDS",
    "UPDATER_GUARDS",
    "around_check",
    "around_state",
    "refusing",
    "refusing_in_updater",
    "refusing_memory",
    "refusing_to_caller",
    "updating_in_place",
]

logger = logging.getLogger("sglang.torchwcache")

_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater"
_MANAGER = f"{_SCHEDULER}.SchedulerWeightUpdaterManager"
_SCHEDULER_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
_CALLER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker.handle"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_WEIGHTS = "weights"
_STATE = "torchwcache"
"""Key of the scheduler's state, which ``/server_info`` shows, too."""

_OUTPUTS = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    "begin_weight_update": "BeginWeightUpdateReqOutput",
}
_MEMORY_OUTPUTS = {
    "release_memory_occupation": "ReleaseMemoryOccupationReqOutput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqOutput",
}

_updating: ContextVar[bool] = ContextVar("torchwcache_updating", default=False)


def updating_in_place() -> bool:
    """Whether SGLang is asking for a loader to write into the weights that it has, which are its own."""
    return _updating.get()


def _reason(operation: str) -> str:
    return (
        f"{operation} is refused: the weights of this server are shared with other processes through torchwcache and must not "
        "change. Nothing was written. Start with TORCHWCACHE_MODE=off to update weights in place"
    )


def _asks_for_weights(request: Any) -> bool:
    return not request.tags or _WEIGHTS in request.tags  # no tags are all of them


def _memory_reason(operation: str) -> str:
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    others = [tag for tag in GPU_MEMORY_ALL_TYPES if tag != _WEIGHTS]
    return (
        f"{operation} is refused for {_WEIGHTS!r}: the weights of this server are shared with other processes through "
        f"torchwcache, and are not this one's to free. Nothing was done. Ask with tags={others} for the rest, or start "
        "with TORCHWCACHE_MODE=off"
    )


def refusing(name: str) -> Callable[..., Any]:
    """An AROUND hook for a request that the scheduler answers with success and message."""

    def hook(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not leases.anything_shared():
            return original(manager, request, *args, **kwargs)
        from sglang.srt.managers import io_struct

        logger.error("%s", _reason(name))
        return getattr(io_struct, _OUTPUTS[name])(success=False, message=_reason(name))

    return hook


def refusing_in_updater(name: str) -> Callable[..., Any]:
    """An AROUND hook for what does the writing, whoever calls it: success and message where it answers so, else an error."""

    def hook(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
        if not leases.anything_shared():
            token = _updating.set(True)
            try:
                return original(updater, *args, **kwargs)
            finally:
                _updating.reset(token)
        if name in ("begin_weight_update", "end_weight_update"):
            raise RuntimeError(_reason(name))
        return False, _reason(name)

    return hook


def around_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """``get_internal_state``: also whether weights are shared, which only the schedulers know."""
    answer = original(scheduler, request)
    if leases.anything_shared():
        answer.internal_state[_STATE] = {"weights": "shared"}
    return answer


def refusing_to_caller(operation: str) -> Callable[..., Any]:
    """An AROUND hook where the engine's own process is asked to release or resume memory.

    The schedulers cannot say why: their answer has no place for a reason, and what they raise ends the engine.
    """

    async def hook(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if _asks_for_weights(request) and any(_STATE in state for state in await manager.get_internal_state()):
            from torchwcache.errors import RefusedError

            reason = _memory_reason(operation)
            logger.error("%s", reason)
            raise RefusedError(reason, reason=reason, kind="SGLang")
        return await original(manager, request, *args, **kwargs)

    return hook


def around_check(original: Callable[..., Any], checker: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """``weights_checker``: all but ``reset_tensors``, which writes random values into the weights."""
    if action == "reset_tensors" and leases.anything_shared():
        raise RuntimeError(_reason("weights_checker with action=reset_tensors"))
    return original(checker, action, *args, **kwargs)


def refusing_memory(operation: str, output: str) -> Callable[..., Any]:
    """An AROUND hook for the scheduler's part of :func:`refusing_to_caller`, whoever it is that asks past that: nothing is done.

    Its answer has no place for a reason, so that only the log has it.
    """

    def hook(original: Callable[..., Any], manager: Any, request: Any) -> Any:
        if not leases.anything_shared() or not _asks_for_weights(request):
            return original(manager, request)
        from sglang.srt.managers import io_struct

        logger.error("%s", _memory_reason(operation))
        return getattr(io_struct, output)()

    return hook


GUARDS: dict[str, Callable[..., Any]] = {
    **{f"{_MANAGER}.{name}": refusing(name) for name in _OUTPUTS},
    **{f"{_MANAGER}.{name}": refusing_memory(name, output) for name, output in _MEMORY_OUTPUTS.items()},
    _SCHEDULER_STATE: around_state,
    _CHECKER: around_check,
}
"""Hooks on what a scheduler is asked, by target."""

CALLER_GUARDS: dict[str, Callable[..., Any]] = {f"{_CALLER}.{name}": refusing_to_caller(name) for name in _MEMORY_OUTPUTS}
"""Hooks on what the engine is asked, where it is asked: in its own process, and in each of several tokenizer workers."""

UPDATER_GUARDS: dict[str, Callable[..., Any]] = {
    f"{_UPDATER}.{name}": refusing_in_updater(name)
    for name in (
        "update_weights_from_disk", "update_weights_from_distributed", "update_weights_from_tensor", "update_weights_from_ipc",
        "load_weights_from_distributed", "begin_weight_update", "end_weight_update",
    )
}  # fmt: skip
"""Hooks on what writes, for callers that do not ask the scheduler."""
