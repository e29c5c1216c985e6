"""Addresses are never captured (design D6): they would be stale in every other process."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import torch

from torchwcache.module.storages import StorageGroup
from torchwcache.module.tensors import TensorTable

__all__ = ["find_addresses"]

_LOWEST_ADDRESS = 1 << 16


def find_addresses(groups: list[StorageGroup], table: TensorTable, integers: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    """Integers, alone or as elements of 64-bit tensors, that point into captured storages.

    Args:
        groups: The captured storages, with their addresses.
        table: The captured tensors.
        integers: ``(path, value)`` of every integer in the Python-side state.

    Returns:
        ``(path, reason)`` for each.
    """
    ordered = sorted(groups, key=lambda group: group.start)
    starts = [group.start for group in ordered]
    problems = []
    for path, value in integers:
        position = bisect.bisect_right(starts, value) - 1
        if value >= _LOWEST_ADDRESS and position >= 0 and value < ordered[position].end:
            problems.append((path, f"{value:#x} is the address of a tensor of this module, which is another one in every process"))
    if not ordered:
        return problems
    low = torch.tensor(starts, dtype=torch.int64)
    high = torch.tensor([group.end for group in ordered], dtype=torch.int64)
    for index, tensor in enumerate(table.tensors):
        if tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() and _holds_address(tensor, low, high):
            problems.append(
                (table.paths[index][0], "it holds addresses of tensors of this module, which are others in every process")
            )
    return problems


def _holds_address(tensor: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> bool:
    values = tensor.detach().view(torch.int64).flatten().cpu()
    if int(values.max()) < int(low[0]):
        return False
    position = torch.searchsorted(low, values, right=True) - 1
    inside = (position >= 0) & (values < high[position.clamp(min=0)])
    return bool(inside.any())
