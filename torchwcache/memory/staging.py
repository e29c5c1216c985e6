"""Files into GPU memory: through blocks of pinned host memory, so that reading and copying go on at the same time."""

from __future__ import annotations

import threading

import torch

from torchwcache.memory.base import Seen
from torchwcache.memory.reading import read_exactly, view_of_memory

__all__ = ["StagedReads"]

_BLOCK_NBYTES = 8 << 20
_BLOCKS = 2
"""Each thread has so many: one is read into while the other is copied from."""


class _Block:
    def __init__(self, nbytes: int) -> None:
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # a limit on locked memory: pageable memory works, slower
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)
        self.view = view_of_memory(self.tensor.data_ptr(), nbytes)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Blocks(threading.local):
    blocks: tuple[_Block, ...] = ()
    turn = 0


class StagedReads:
    """Reads of files into tensors on one device, from any number of threads.

    Args:
        device: Where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mine = _Blocks()

    def read(self, fd: int, offset: int, target: torch.Tensor, seen: Seen | None = None) -> None:
        """Fill a contiguous tensor; it holds its bytes when this returns, for whatever stream.

        Args:
            fd: The file.
            offset: Of the first byte in it.
            target: On this device. What was queued on it before must have been waited for.
            seen: Gets the bytes as they pass through host memory, in pieces that end at multiples of the block size in the file.

        Raises:
            EOFError: The file ends before the tensor is full.
        """
        flat = target.detach().view(-1).view(torch.uint8)
        with torch.cuda.device(self._device), torch.no_grad():
            mine = self._mine
            if not mine.blocks:
                mine.blocks = tuple(_Block(_BLOCK_NBYTES) for _ in range(_BLOCKS))
            position, end = 0, flat.numel()
            try:
                while position < end:
                    at = offset + position
                    nbytes = min(_BLOCK_NBYTES - at % _BLOCK_NBYTES, end - position)
                    block = mine.blocks[mine.turn]
                    mine.turn = (mine.turn + 1) % _BLOCKS
                    block.copied.synchronize()
                    view = block.view[:nbytes]
                    read_exactly(fd, at, view)
                    if seen is not None:
                        seen(at, view)
                    # On the thread's current stream: streams of our own would take device memory, and there is one copy engine.
                    flat[position : position + nbytes].copy_(block.tensor[:nbytes], non_blocking=True)
                    block.copied.record()
                    position += nbytes
            finally:
                for block in mine.blocks:
                    block.copied.synchronize()
