"""Which tensors of an attached module no longer have the bytes that were published?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torchwcache.manifest import Manifest
from torchwcache.memory.base import MappedSegment
from torchwcache.module.replace import replace_tensors
from torchwcache.module.storages import tensor_extent

__all__ = ["modified_tensors"]


def modified_tensors(module: nn.Module, manifest: Manifest, segments: Sequence[MappedSegment]) -> tuple[str, ...]:
    """Paths of tensors on shared storages whose bytes this process changed (its own copy; nobody else sees it).

    Args:
        module: Attached or published in this process.
        manifest: Its manifest.
        segments: Its mapped segments.
    """
    changed: list[tuple[int, int]] = []
    for storage in manifest.storages:
        segment = segments[storage.segment]
        if storage.shared and segment.is_modified(storage.offset, storage.nbytes):
            start = segment.tensor(storage.offset, storage.nbytes, torch.uint8).data_ptr()
            changed.append((start, start + storage.nbytes))
    if not changed:
        return ()
    names: set[str] = set()

    def note(tensor: torch.Tensor, path: str) -> None:
        if not tensor.is_meta and tensor.numel():
            start, end = tensor_extent(tensor)
            if any(low < end and start < high for low, high in changed):
                names.add(path)

    replace_tensors(module, note)
    return tuple(sorted(names))
