"""xxh3-128 of tensors and of the memory that they view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from torchwcache.module.storages import byte_view, tensor_extent

__all__ = ["digest_of_bytes", "digest_of_memory", "digest_of_tensor", "is_dense"]

_CHUNK_NBYTES = 64 << 20


def digest_of_bytes(data: bytes) -> str:
    """Of some bytes: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def _digest(flat: torch.Tensor) -> str:
    """Of a one-dimensional uint8 tensor, which passes through the CPU in pieces."""
    state = xxhash.xxh3_128()
    for start in range(0, flat.numel(), _CHUNK_NBYTES):
        piece: Any = flat[start : start + _CHUNK_NBYTES].cpu().numpy()
        state.update(piece)
    return state.hexdigest()


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Of a tensor's elements in row-major order, by their bits."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    offset = int(plain.storage_offset()) * plain.element_size()
    return _digest(byte_view(plain.untyped_storage(), offset, plain.numel() * plain.element_size()))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor views every byte between its first and its last, whatever the order of its dimensions."""
    start, end = tensor_extent(tensor)
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return end - start == tensor.numel() * tensor.element_size()


def digest_of_memory(start: int, nbytes: int, tensors: Sequence[torch.Tensor]) -> str:
    """Of the memory that some tensors view together.

    Bytes that none of them views count as zero: they hold whatever the allocator left there, which differs from load to load.

    Args:
        start: Address of the first byte.
        nbytes: Up to the last byte that is viewed.
        tensors: All that view this memory.
    """
    for tensor in tensors:
        if tensor_extent(tensor) == (start, start + nbytes) and is_dense(tensor):
            return _digest(_bytes_at(tensor, start, nbytes))
    gathered = torch.zeros(nbytes, dtype=torch.uint8, device=tensors[0].device)
    for tensor in tensors:
        size = tensor.element_size()
        first = tensor_extent(tensor)[0] - start
        shape, stride = (*tensor.shape, size), (*(step * size for step in tensor.stride()), 1)
        source = byte_view(tensor.untyped_storage(), 0, tensor.untyped_storage().nbytes())
        offset = int(tensor.storage_offset()) * size
        gathered.as_strided(shape, stride, first).copy_(source.as_strided(shape, stride, offset))
    return _digest(gathered)


def _bytes_at(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return byte_view(storage, start - storage.data_ptr(), nbytes)
