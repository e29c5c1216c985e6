"""Memory accounting where vLLM does not ask for weights that lie outside (design D18): before 0.32, and for draft models.

Before 0.32, free memory below ``total * gpu_memory_utilization`` stops the start before any loader runs, although on a hit most of
what is missing are the very weights that this engine is about to map. And what was resident before vLLM's first look is charged to
nobody, so that the KV cache would come out larger than on a start from disk.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
import weakref
from typing import Any

from torchwcache.attachment import Attachment
from torchwcache.engine_memory import Count, OwnMemory, growth_of

__all__ = [
    "charge_later",
    "correct_start_check",
    "counted_before_the_load",
    "counted_by_vllm",
    "external_nbytes",
    "not_counted_nbytes",
    "note_evicted",
    "requested_beside",
]

_MARK = "_torchwcache_external"


@dataclasses.dataclass(slots=True)
class _Later:
    """What is to be charged to one engine's worker; a process may hold several, one after the other."""

    nbytes: int = 0
    evicted: int = 0
    taken: bool = False


_later: dict[int, _Later] = {}
"""By the identity of the engine's ``device_config``: a draft's config is a copy of the engine's, with this part in common."""


def correct_start_check() -> None:
    """Take what a hit maps off the memory that this engine asks for, as vLLM itself does since 0.32. For our load format only.

    Raises:
        TypeError: vLLM's own check is called otherwise than before 0.32; it was left as it is.
    """
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if hasattr(BaseModelLoader, "get_external_weight_memory"):
        return
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.worker import utils

    original = utils.request_memory
    if getattr(original, _MARK, False):
        return
    parameters = list(inspect.signature(original).parameters)
    if parameters != ["init_snapshot", "cache_config"]:
        raise TypeError(f"vllm.v1.worker.utils.request_memory takes {parameters}")

    @functools.wraps(original)
    def request_memory(init_snapshot: Any, cache_config: Any) -> int:
        external, evicted = _external_nbytes(get_current_vllm_config_or_none())
        note_evicted(init_snapshot, evicted)
        if external == 0:
            return int(original(init_snapshot, cache_config))
        return requested_beside(external, init_snapshot, cache_config)

    setattr(request_memory, _MARK, True)
    utils.request_memory = request_memory
    worker = sys.modules.get("vllm.v1.worker.gpu_worker")
    if worker is not None and getattr(worker, "request_memory", None) is original:
        worker.request_memory = request_memory  # type: ignore[attr-defined]


def requested_beside(external: int, snapshot: Any, cache_config: Any) -> int:
    """What this engine may use of the device beside the weights that it maps.

    Raises:
        ValueError: Less than that is free.
    """
    budget = math.ceil(snapshot.total_memory * cache_config.gpu_memory_utilization)
    requested = budget - external
    if requested <= 0 or snapshot.free_memory < requested:
        raise ValueError(
            f"free memory ({snapshot.free_memory / 2**30:.2f} GiB) is less than gpu_memory_utilization "
            f"{cache_config.gpu_memory_utilization} asks for beside the weights that torchwcache maps ({budget / 2**30:.2f} - "
            f"{external / 2**30:.2f} GiB); lower --gpu-memory-utilization, or free memory that other processes use"
        )
    return int(requested)


def note_evicted(snapshot: Any, nbytes: int) -> None:
    """Correct vLLM's first look at a device, a ``MemorySnapshot``, for what was evicted since; in bytes."""
    for name, change in (("free_memory", nbytes), ("cuda_memory", -nbytes), ("non_torch_memory", -nbytes)):
        if nbytes and hasattr(snapshot, name):
            setattr(snapshot, name, getattr(snapshot, name) + change)


def external_nbytes(attachment: Attachment, own: int) -> int:
    """What vLLM is to count for weights that are mapped: what it would have counted had it loaded them, in bytes.

    Args:
        attachment: To mapped weights.
        own: What it counts by itself, of the copies that this attachment has; see ``torchwcache.engine_memory.OwnMemory``.
    """
    taken = growth_of(attachment.model, counted_by_vllm())
    return attachment.report.mapped_nbytes if taken is None else max(0, taken - own)


def not_counted_nbytes(attachment: Attachment, own: int) -> int:
    """What vLLM has not counted, when the loader has returned, of what it would have counted from disk; negative: too much.

    Of weights that are mapped it has counted nothing; of weights that were published just now, the segments that they are in now.
    """
    report = attachment.report
    if report.source != "disk":
        return external_nbytes(attachment, own)
    taken = growth_of(attachment.model, counted_by_vllm())
    if not report.published or taken is None:
        return 0
    return taken - attachment.memory_nbytes - own


def counted_by_vllm() -> Count:
    """Since 0.27 vLLM looks at what is free on the device; before, at what torch's allocator gave to tensors."""
    from vllm.utils.mem_utils import MemoryProfilingResult

    return "reserved" if hasattr(MemoryProfilingResult, "total_consumed") else "allocated"


def counted_before_the_load(own: OwnMemory) -> int:
    """Of what this process has taken before vLLM's own load begins, what vLLM counts nevertheless, in bytes.

    Args:
        own: Since before hit or miss was decided: the copies of an attachment.
    """
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    # Since 0.32 its first look at the device comes after that. Up to 0.26 it looked at what tensors take while it loads. Between,
    # it looked at the device, and before that.
    looks_before = not hasattr(BaseModelLoader, "get_external_weight_memory")
    return own.nbytes("reserved") if looks_before and counted_by_vllm() == "reserved" else 0


def _external_nbytes(vllm_config: Any) -> tuple[int, int]:
    """Bytes of weights that are mapped, and by how many bytes more are free, since others were evicted."""
    from torchwcache_vllm.loader import LOAD_FORMAT, TorchwcacheModelLoader

    if vllm_config is None or vllm_config.load_config.load_format != LOAD_FORMAT:
        return 0, 0  # no loader of another's is made: that may do something
    loader = TorchwcacheModelLoader(vllm_config.load_config)
    return loader.get_external_weight_memory(vllm_config), loader.evicted_nbytes


def charge_later(nbytes: int, vllm_config: Any, *, evicted: int = 0) -> None:
    """Take what vLLM has not counted off what it finds free for the KV cache, or add what it counted too much, in bytes.

    Args:
        nbytes: Of one model; those of one engine add up.
        vllm_config: As the loader got it: the engine's, or a draft's.
        evicted: Bytes that others had used, and that were evicted while this model was loaded: without them vLLM would take the
            engine for so much smaller, or would end the start when more is free than it saw at first.
    """
    worker: Any = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    if worker is None:
        return
    engine = vllm_config.device_config
    if id(engine) not in _later:
        weakref.finalize(engine, _later.pop, id(engine), None)
    if id(engine) not in _later or _later[id(engine)].taken:
        _later[id(engine)] = _Later()  # an engine loads, and then looks how much is left: the next load is another engine's
    _later[id(engine)].nbytes += nbytes
    _later[id(engine)].evicted += evicted
    original = worker.determine_available_memory
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def determine_available_memory(self: Any) -> int:
        later = _later.get(id(self.vllm_config.device_config))
        if later is not None and later.evicted:
            note_evicted(self.init_snapshot, later.evicted)
            later.evicted = 0
        found = int(original(self))
        if later is None or later.taken:
            return found
        later.taken = True
        # When it has captured its graphs, vLLM computes its startup plan from this: how much KV cache later starts may have without
        # looking, also those that map nothing (``vllm/v1/worker/startup_plan.py``).
        if hasattr(self, "requested_memory"):
            self.requested_memory -= later.nbytes
        if self.cache_config.kv_cache_memory_bytes:
            return found  # the user, or such a plan, said how much, and vLLM counted nothing
        return max(0, found - later.nbytes)

    setattr(determine_available_memory, _MARK, True)
    worker.determine_available_memory = determine_available_memory
