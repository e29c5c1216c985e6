"""Hash what a load reads while it reads it: the memory just filled is still in the core's cache, and no file is read twice."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from torchwcache.identity.hashing import LEAF_NBYTES

if TYPE_CHECKING:
    from torchwcache.identity.checkpoint import CheckpointIdentity
    from torchwcache.memory.base import Memory

__all__ = ["HashedReads"]

_PYBUF_READ = 0x100
# Not ``numpy()``: torch does not require it. Not an array type of ctypes either: each size makes a new class.
_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.restype = ctypes.py_object
_view_of_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


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

        Bytes that go elsewhere than to the CPU cannot be hashed here: the hash reads them by itself.

        Raises:
            EOFError: The file ends before the tensor is full.
        """
        file = self._identity.being_hashed(fd) if target.device.type == "cpu" and target.is_contiguous() else None
        nbytes = target.numel() * target.element_size()
        # What reaches beyond the end is the memory's to refuse: it fails there without a byte being hashed.
        if file is None or not nbytes or offset + nbytes > file.nbytes:
            self._memory.read_file(fd, offset, target)
            return
        flat = target.detach().view(-1).view(torch.uint8)
        data = _view_of_memory(flat.data_ptr(), nbytes, _PYBUF_READ)
        start = 0
        while start < nbytes:
            # To the end of a leaf, so that all but the first and the last piece are whole ones.
            stop = min(start + LEAF_NBYTES - (offset + start) % LEAF_NBYTES, nbytes)
            self._memory.read_file(fd, offset + start, flat[start:stop])
            file.feed(offset + start, data[start:stop])
            start = stop
