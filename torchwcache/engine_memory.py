"""What a load takes of a GPU by the count of torch's allocator, for engines that size their KV cache by it (design D18).

A start that maps weights allocates nothing for them. To be charged what a start from disk would be, it must know what the load
took: not the bytes of the weights, but those of the allocator's blocks, which are rounded up (to 2 MiB from 10 MiB on). The process
that loads measures it, and it travels with the module.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from torchwcache.production import wait_until_free

__all__ = ["Count", "OwnMemory", "allocator_nbytes", "growth_of", "make_free", "note_growth", "wanted_nbytes"]

Count = Literal["allocated", "reserved"]
"""Bytes of blocks that tensors lie in, or of all memory that the allocator took from the device."""

_ATTRIBUTE = "_torchwcache_load_nbytes"
_GIVEN_BACK_WITHIN_S = 5.0
_OTHERS_NBYTES = 64 << 20
"""What other processes may take meanwhile without our waiting for it."""


def allocator_nbytes(device: str, *, collect: bool = True) -> dict[Count, int]:
    """What torch's allocator counts on a device now, in bytes, without blocks that are unused; empty where that is no CUDA device.

    Args:
        device: As torch names it.
        collect: Do not count what is garbage either. Takes a tenth of a second in a large program.
    """
    where = torch.device(device)
    if where.type != "cuda":
        return {}
    if collect:
        gc.collect()
    with torch.cuda.device(where):
        torch.cuda.empty_cache()
    return {"allocated": torch.cuda.memory_allocated(where), "reserved": torch.cuda.memory_reserved(where)}


class OwnMemory:
    """What torch's allocator has taken in this process since this was made; nothing where that is no CUDA device.

    Args:
        device: As torch names it.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = allocator_nbytes(device, collect=False)

    def nbytes(self, count: Count) -> int:
        """Until now, in bytes."""
        return allocator_nbytes(self._device, collect=False)[count] - self._before[count] if self._before else 0


def wanted_nbytes(device: str, fraction: float, *, mapped: int = 0, needed: int = 0) -> int:
    """How many bytes of a CUDA device should be free when an engine begins to count them.

    Args:
        device: As torch names it.
        fraction: Of all the device's memory, what the engine is to use, weights included.
        mapped: Bytes of weights that are there already, and that the engine does not need again.
        needed: Bytes that a load and a publish take: of what was evicted in the middle of them the engine would not know.
    """
    return max(math.ceil(torch.cuda.mem_get_info(device)[1] * fraction) - mapped, needed)


def make_free(evict: Callable[[int, Callable[[], int]], int], device: str, nbytes: int) -> int:
    """Have entries that nobody uses evicted until ``nbytes`` of a CUDA device are free, where an engine is about to count them.

    Args:
        evict: ``RankStart.free_up``: evicts until so many bytes are free, by a count of what is; returns the bytes of what went.
        device: As torch names it.
        nbytes: How many the engine wants.

    Returns:
        By how many bytes more are free.
    """

    def free() -> int:
        return int(torch.cuda.mem_get_info(device)[0])

    before = free()
    evicted = evict(nbytes, free)
    if not evicted:
        return 0
    # All of it, however little was wanted: what came later would look as if the engine itself had freed it.
    return max(0, wait_until_free(free, before + evicted - _OTHERS_NBYTES, within_s=_GIVEN_BACK_WITHIN_S) - before)


def note_growth(module: nn.Module, before: dict[Count, int], device: str) -> None:
    """Keep in a module that was loaded just now by how much the counts grew since ``before``, in bytes."""
    if before:
        after = allocator_nbytes(device)
        module.__dict__[_ATTRIBUTE] = {name: after[name] - nbytes for name, nbytes in before.items()}


def growth_of(module: nn.Module, count: Count) -> int | None:
    """What loading this module took where it was loaded, in bytes; ``None`` where nobody measured it."""
    found = module.__dict__.get(_ATTRIBUTE)
    return None if found is None else int(found[count])
