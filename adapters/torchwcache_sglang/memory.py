"""Memory accounting (design D18): the KV cache comes out as on a start from disk with the same flags.

SGLang measures what is free before the load (the *baseline*) and after it, and leaves the fraction ``1 - mem_fraction_static`` of
the baseline free. Weights that lay there before the baseline make it smaller; weights that were published after it are as large as
their segments, not as the allocator's blocks that they were loaded into. Either way there is an amount which, added to the
baseline, gives the KV cache of a start from disk.
"""

from __future__ import annotations

import torch

from torchwcache.attachment import Attachment
from torchwcache.engine_memory import growth_of
from torchwcache.engine_ranks import RankGroup
from torchwcache_sglang import leases
from torchwcache_sglang.context import option

__all__ = ["agreed_nbytes", "baseline_nbytes", "free_nbytes", "held_nbytes", "static_fraction"]


def baseline_nbytes(attachment: Attachment, own: int, fraction: float | None, evicted: int = 0) -> int:
    """What to add to the baseline, in bytes; negative where SGLang took more for used than it would from disk.

    With the clean baseline ``P`` and ``f`` for ``mem_fraction_static``, a start from disk that takes ``R`` bytes of the device gets
    a KV cache of ``P - R - P (1 - f)``. Here the segments have ``W`` bytes, and this process's allocator took ``C`` for copies.
    After a hit the baseline was ``P - W``, after a publish ``P``; either way ``P - W - C`` bytes are free now.

    Args:
        attachment: What the loader is going to return.
        own: By how much the memory of torch's allocator has grown since before the load, in bytes.
        fraction: ``mem_fraction_static``; ``None`` where SGLang does not tell.
        evicted: Entries that nobody used and that lay on the device when the baseline was measured, but do no longer, in bytes.
    """
    report = attachment.report
    resident = report.source == "cache"
    taken = growth_of(attachment.model, "reserved")
    if taken is None or fraction is None or not 0 < fraction < 1:
        return (report.mapped_nbytes if resident else 0) + evicted
    if not attachment.memory_nbytes:
        return evicted  # loaded without the cache
    segments = attachment.memory_nbytes
    before = segments if resident else 0
    return round((taken - own - segments) / (1 - fraction)) + before + evicted


def free_nbytes(device: str) -> int:
    """What is free on a CUDA device now, in bytes; 0 for other devices."""
    return int(torch.cuda.mem_get_info(device)[0]) if torch.device(device).type == "cuda" else 0


def held_nbytes(device: str) -> int:
    """What of its share of a CUDA device this engine has already, in bytes: a draft's target, and the copies of an attachment."""
    return leases.mapped_nbytes() + torch.cuda.memory_reserved(device)


def agreed_nbytes(group: RankGroup, free: int, added: int) -> int:
    """What every rank adds to the baseline, in bytes. All ranks must ask, and all get the same.

    SGLang's baseline is the least of what was free on the devices of all ranks, so that each of them computes the same number of
    tokens; nothing compares those afterwards. What a rank found in memory, and what was evicted for it, is each rank's own. So the
    new baseline is the least, too: of what would have been free.

    Args:
        group: The ranks that load one model together.
        free: What was free on this rank's device before the load, in bytes.
        added: What this rank would add were it alone, in bytes; see :func:`baseline_nbytes`.
    """
    words = group.exchange(f"{free} {added}", "the memory that was free")
    ranks = [tuple(map(int, word.split())) for word in words]
    return min(free + added for free, added in ranks) - min(free for free, _ in ranks)


def static_fraction() -> float | None:
    """``mem_fraction_static`` as SGLang resolved it; ``None`` where no server was started, but somebody uses SGLang's loaders."""
    value = option("mem_fraction_static")
    return value if isinstance(value, float) else None
