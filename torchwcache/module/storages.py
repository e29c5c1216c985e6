"""Which bytes a set of tensors views: storages by overlapping byte ranges, not by storage object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchwcache.manifest import ITEMSIZE

__all__ = ["StorageGroup", "byte_view", "dtype_name", "group_storages", "tensor_extent", "view_storage"]

_BASE_ALIGNMENT = 512
"""Storages start at a multiple of this many bytes from the start of the original, so that no tensor loses alignment, or gains any:
kernels choose their path by it. That of torch's CUDA allocator; its CPU allocator has 64."""


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def tensor_extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that a tensor views, as addresses; equal for a tensor without elements."""
    start = tensor.data_ptr()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * ITEMSIZE[dtype_name(tensor.dtype)]


def byte_view(storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over a part of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (nbytes,), (1,))


def view_storage(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A plain tensor over a storage; ``offset`` and ``stride`` count elements."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(shape), tuple(stride))


@dataclass(slots=True)
class StorageGroup:
    """One storage of a manifest while it is being captured.

    Attributes:
        start: Address of its first byte.
        nbytes: Its length: the union of what is viewed, ends trimmed.
        members: Indices of the tensors that view it.
    """

    start: int
    nbytes: int
    members: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Address one past the last byte."""
        return self.start + self.nbytes


@dataclass(slots=True)
class _Hull:
    base: int
    start: int
    end: int
    members: list[int]


def group_storages(tensors: Sequence[torch.Tensor]) -> list[StorageGroup]:
    """Group tensors by the memory they view.

    Tensors of one torch storage stay together (what one could reach by ``as_strided`` it can reach afterwards), and so do storages
    whose viewed bytes overlap: two ``torch.from_numpy`` views of one array are two storages over the same memory.

    Tensors without elements are in no group.
    """
    hulls: dict[int, _Hull] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() == 0:
            continue
        start, end = tensor_extent(tensor)
        base = tensor.untyped_storage().data_ptr()
        hull = hulls.get(base)
        if hull is None:
            hulls[base] = _Hull(base, start, end, [index])
        else:
            hull.start, hull.end = min(hull.start, start), max(hull.end, end)
            hull.members.append(index)
    groups: list[StorageGroup] = []
    for hull in sorted(hulls.values(), key=lambda h: (h.start, h.end)):
        # Trimmed, but never by less than a whole number of aligned steps from where the allocator put the storage.
        start = hull.start - (hull.start - hull.base) % _BASE_ALIGNMENT
        if groups and hull.start < groups[-1].end:
            last = groups[-1]
            last.nbytes = max(last.end, hull.end) - last.start
            last.members.extend(hull.members)
        else:
            groups.append(StorageGroup(start, hull.end - start, list(hull.members)))
    return groups
