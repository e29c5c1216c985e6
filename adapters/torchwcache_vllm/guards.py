"""What would write into weights that others map, or take them away: refused in words, before it begins."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchwcache.errors import RefusedError

__all__ = [
    "LOAD_FORMAT",
    "guard",
    "offence_of",
    "refusal_of",
    "refuse_write",
    "refused",
    "shared_models",
    "shares_weights",
    "unknown_device",
    "wrap",
]

LOAD_FORMAT = "torchwcache"

_MARK = "_torchwcache_guard"
_shared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_WORKER_WRITES = {
    "reload_weights": "reloading weights in place",
    "update_weights": "a weight update",
    "init_weight_transfer_engine": "a weight transfer",
    "start_weight_update": "a weight update",
    "start_draft_weight_update": "a weight update of the draft model",
    "reset_weights": "resetting weights",
    "elastic_ep_execute": "elastic expert parallelism",
}
_CLASSES = (
    ("vllm.v1.worker.gpu_worker", "Worker", (*_WORKER_WRITES, "sleep", "discard")),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("reload_weights",)),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", ("reload_weights",)),
)


def refusal_of(vllm_config: Any, load_config: Any) -> str:
    """Why this configuration is not served from the cache; empty when it is."""
    parallel, offload = vllm_config.parallel_config, getattr(vllm_config, "offload_config", None)
    if getattr(parallel, "enable_eplb", False):
        return "--enable-eplb moves experts between ranks while the engine serves, which writes into the weights"
    if getattr(parallel, "enable_elastic_ep", False):
        return "--enable-elastic-ep gives ranks other experts while the engine serves"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "--weight-transfer-config lets a trainer write into the weights"
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        if parallel.data_parallel_size > 1:
            return "prefill context parallelism together with data parallelism: no group of ranks loads one model together"
        if not parallel.enable_expert_parallel:
            return (
                "prefill context parallelism without --enable-expert-parallel: ranks that count as one hold other slices of experts"
            )
    if load_config.device is not None and str(load_config.device) != str(vllm_config.device_config.device):
        return "the load config puts weights on another device than the engine's"
    if elsewhere := unknown_device(vllm_config):
        return elsewhere
    if getattr(vllm_config, "engram_config", None) is not None:
        return "n-gram embedding tables (--engram-config) lie in host memory, or are shared with other ranks"
    if offload is not None and (_value(offload, "uva", "cpu_offload_gb") or _value(offload, "prefetch", "offload_group_size")):
        return "--cpu-offload-gb and its kin move weights to host memory"
    if getattr(vllm_config.cache_config, "cpu_offload_gb", 0):
        return "--cpu-offload-gb moves weights to host memory"
    return ""


def unknown_device(vllm_config: Any) -> str:
    """Why nothing can be shared on the engine's device; empty when it can."""
    device = str(vllm_config.device_config.device)
    kind = "an AMD GPU" if torch.version.hip is not None and device.startswith("cuda") else device.partition(":")[0]
    if kind in ("cpu", "cuda"):
        return ""
    return f"memory that outlives its process is known on the CPU and on NVIDIA GPUs, not on {kind}"


def _value(offload: Any, part: str, name: str) -> Any:
    return getattr(getattr(offload, part, None), name, 0)


def shared_models() -> list[nn.Module]:
    """The models of this process that have weights which others map, in this rank or in another of the same engine."""
    return list(_shared)


def shares_weights(_worker: Any = None) -> bool:
    """Whether there are any. The engine core asks this of its workers."""
    return bool(_shared)


def guard(model: nn.Module, *, shared: bool) -> None:
    """Refuse whatever would write into this model, as long as it lives. Models loaded without the cache are left alone.

    Args:
        model: What this rank serves.
        shared: Whether weights of any rank are shared. vLLM tells all ranks to write: were only some of them to refuse, the engine
            would serve a mix of two models.
    """
    if not shared:
        return
    _shared.add(model)
    for module_name, class_name, names in _CLASSES:
        # Looked at, not imported: in the worker that serves, what is going to be called is there already.
        cls = getattr(sys.modules.get(module_name), class_name, None)
        for name in names if cls is not None else ():
            wrap(cls, name, functools.partial(_refuse_call, name))


def _refuse_call(name: str, _self: Any, *args: Any, **kwargs: Any) -> None:
    refuse_write(offence_of(name, *args, **kwargs))


def offence_of(method: str, *args: Any, **kwargs: Any) -> str:
    """What a call of a worker's method does to the weights, in words; empty when it leaves them alone."""
    if method == "sleep":
        level = args[0] if args else kwargs.get("level", 1)
        return "sleep level 2, which throws the weights away" if level >= 2 else ""
    if method == "discard":
        return "discarding weights" if "weights" in (args[0] if args else kwargs.get("tags", ())) else ""
    return _WORKER_WRITES.get(method, "")


def wrap(cls: Any, name: str, before: Callable[..., None]) -> None:
    """Have a method of a class call something else first, which may raise; once only."""
    method = cls.__dict__.get(name)
    if method is None or getattr(method, _MARK, False):
        return

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(guarded, _MARK, True)
    setattr(cls, name, guarded)


def refuse_write(what: str) -> None:
    """Raise while weights of this engine are shared.

    Args:
        what: What is about to be done; nothing is refused when it is empty.

    Raises:
        RefusedError: They are.
    """
    if what and _shared:
        raise refused(what)


def refused(what: str) -> RefusedError:
    """The error that says so."""
    return RefusedError(
        f"{what} is refused: the weights of this engine come from torchwcache and are shared with other processes. Nothing was "
        "changed, and the engine goes on serving. Start it with another --load-format (or TORCHWCACHE_MODE=off) for that",
        reason=what,
        kind="guard",
    )
