"""What would write into weights that others map, or take them away: refused in words, before it begins."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from torchwcache.attachment import Attachment
from torchwcache.errors import RefusedError

__all__ = ["guard", "refusal_of", "refuse_write", "shared_models"]

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
    ("vllm.v1.worker.gpu_worker", "Worker", _WORKER_WRITES),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", {"reload_weights": "reloading weights in place"}),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", {"reload_weights": "reloading weights in place"}),
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
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1 and parallel.data_parallel_size > 1:
        return "prefill context parallelism together with data parallelism: no group of ranks loads one model together"
    if load_config.device is not None and str(load_config.device) != str(vllm_config.device_config.device):
        return "the load config puts weights on another device than the engine's"
    if offload is not None and (_value(offload, "uva", "cpu_offload_gb") or _value(offload, "prefetch", "offload_group_size")):
        return "--cpu-offload-gb and its kin move weights to host memory"
    if getattr(vllm_config.cache_config, "cpu_offload_gb", 0):
        return "--cpu-offload-gb moves weights to host memory"
    return ""


def _value(offload: Any, part: str, name: str) -> Any:
    return getattr(getattr(offload, part, None), name, 0)


def shared_models() -> list[nn.Module]:
    """The models of this process whose weights others map."""
    return list(_shared)


def guard(attachment: Attachment) -> None:
    """Refuse whatever would write into this model, as long as it lives. Models loaded without the cache are left alone."""
    if attachment.report.source == "disk" and not attachment.report.published:
        return
    _shared.add(attachment.model)
    for module_name, class_name, writes in _CLASSES:
        # Looked at, not imported: in the worker that serves, what is going to be called is there already.
        cls = getattr(sys.modules.get(module_name), class_name, None)
        for name, what in writes.items() if cls is not None else ():
            _wrap(cls, name, lambda *args, _what=what, **kwargs: _what)
        if cls is not None:
            _wrap(cls, "sleep", _sleep)
            _wrap(cls, "discard", lambda self, tags=(), **_: "discarding weights" if "weights" in tags else "")


def _sleep(self: Any, level: int = 1, *_: Any, **__: Any) -> str:
    return "sleep level 2, which throws the weights away" if level >= 2 else ""


def _wrap(cls: Any, name: str, offence: Callable[..., str]) -> None:
    method = cls.__dict__.get(name)
    if method is None or getattr(method, _MARK, False):
        return

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        what = offence(*args, **kwargs)
        if what:
            refuse_write(what)
        return method(*args, **kwargs)

    setattr(guarded, _MARK, True)
    setattr(cls, name, guarded)


def refuse_write(what: str) -> None:
    """Raise while weights of this process are shared.

    Raises:
        RefusedError: They are.
    """
    if _shared:
        raise RefusedError(
            f"{what} is refused: the weights of this engine come from torchwcache and are shared with other processes. Nothing was "
            "changed, and the engine goes on serving. Start it with another --load-format (or TORCHWCACHE_MODE=off) for that",
            reason=what,
            kind="guard",
        )
