"""Hash what a load reads while it reads it: the memory just filled is still in the core's cache, and no file is read twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torchwcache.identity.checkpoint import CheckpointIdentity
    from torchwcache.memory.base import Memory

__all__ = ["HashedReads"]


class HashedReads:
    """``Memory.read_file`` that hands what it read to the checkpoint's hash.

    Args:
        memory: What fills tensors.
        identity: Gets the bytes, for as long as it is hashing.
    """

    def __init__(self, memory: Memory, identity: CheckpointIdentity) -> None:
        self._memory, self._identity = memory, identity

    def read_file(self, fd: int, offset: int, target: torch.Tensor) -> None:
        """Fill a contiguous tensor in this memory with the bytes of a file from ``offset`` on.

        Raises:
            EOFError: The file ends before the tensor is full.
        """
        file = self._identity.being_hashed(fd)
        # What reaches beyond the end is the memory's to refuse: it fails there without a byte being hashed.
        if file is not None and offset + target.numel() * target.element_size() <= file.nbytes:
            self._memory.read_file(fd, offset, target, file.feed)
        else:
            self._memory.read_file(fd, offset, target)
