"""Pack: move the bytes of a captured module into segments, and let the module go on from there.

Segment by segment: copy the storages that go into it, point the module's own tensors at the copies (the tensor objects stay the
same), free the originals, and only then make the next segment. So the memory in use exceeds the weights by one segment at most, and
a pack that fails leaves a module that works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from torchwcache.memory.base import Memory, WritableSegment
from torchwcache.module.capture import Captured, Placement
from torchwcache.module.storages import StorageGroup, byte_view, view_storage

__all__ = ["SegmentWriter", "pack"]


class SegmentWriter:
    """Segments that are being filled, and a place in them for whoever asks. A context manager: closes what was not taken over.

    Args:
        memory: Where segments come from.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.segments: list[WritableSegment] = []
        self._step = 0
        self._expected: deque[int] = deque()
        self._free_from = 0

    def expect(self, sizes: Iterable[int]) -> None:
        """Say what is going to be asked for from now on, in bytes and in order, so that segments are made to fit.

        It decides the size of segments, never whether there is room: who asks for something else gets it.
        """
        self._expected = deque(self._aligned(nbytes) for nbytes in sizes)
        self._step = self.memory.segment_nbytes(sum(self._expected))

    def _aligned(self, nbytes: int) -> int:
        align = self.memory.alignment
        return -(-nbytes // align) * align

    def _size_of_next(self, nbytes: int) -> int:
        """Bytes of a segment that begins with ``nbytes`` bytes: what is expected after them, as far as it fits."""
        size = self._aligned(nbytes)
        for further in self._expected:
            if size + further > self._step:
                break
            size += further
        return size

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up all descriptors; memory goes with its last tensor. Idempotent."""
        for segment in self.segments:
            segment.close()

    def place(self, nbytes: int, *, zeroed: bool = True, before_segment: Callable[[], None] | None = None) -> tuple[int, int]:
        """Reserve ``nbytes`` bytes: segment number and offset.

        Args:
            nbytes: How many.
            zeroed: Whether the bytes must be zeros.
            before_segment: Called before a further segment is made.

        Raises:
            SegmentMemoryError: There is not enough memory for another segment.
        """
        offset = self._aligned(self._free_from)
        if self._expected:
            self._expected.popleft()
        if not self.segments or offset + nbytes > self.segments[-1].nbytes:
            if self.segments and before_segment is not None:
                before_segment()
            self.segments.append(self.memory.allocate(self._size_of_next(nbytes), zeroed=zeroed))
            offset = 0
        self._free_from = offset + nbytes
        return len(self.segments) - 1, offset

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A zeroed one-dimensional uint8 tensor of ``nbytes`` elements in a segment, with a storage of its own."""
        number, offset = self.place(nbytes)
        return self.segments[number].tensor(offset, nbytes)

    def locate(self, group: StorageGroup) -> Placement | None:
        """Where a storage lies already, if it was loaded straight into a segment."""
        for number, segment in enumerate(self.segments):
            offset = segment.offset_of(group.start)
            if offset is not None and offset + group.nbytes <= segment.nbytes:
                return Placement(number, offset)
        return None


def pack(captured: Captured, writer: SegmentWriter) -> list[Placement]:
    """Bring every storage of a captured module into segments.

    The module's own tensors end up on the segments (shared storages) or on memory of their own (private ones, which the module may
    write).

    Args:
        captured: From ``capture``. Its module is changed in place: same tensor objects, other memory.
        writer: Gives the places; may hold storages that the load put there.

    Returns:
        A placement for each storage.

    Raises:
        SegmentMemoryError: Memory ran out. The module still works.
    """
    memory = writer.memory
    placements: list[Placement] = []
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []

    def free_originals() -> None:
        memory.synchronize()  # the copies read them
        _move(moves)
        moves.clear()
        memory.release_freed()

    memory.synchronize()  # what the load did on other streams is there before it is copied
    there = [writer.locate(group) for group in captured.storages]
    writer.expect(group.nbytes for group, placed in zip(captured.storages, there, strict=True) if placed is None)
    for group, shared, placed in zip(captured.storages, captured.shared, there, strict=True):
        members = [captured.tensors[i] for i in group.members]
        if placed is not None:
            if not shared:  # the segment is about to become read-only, and this module may write here
                _move(_views(members, group, byte_view_of(members, group).clone()))
            placements.append(placed)
            continue
        number, offset = writer.place(group.nbytes, zeroed=False, before_segment=free_originals)
        target = writer.segments[number].tensor(offset, group.nbytes)
        _copy(members, group, target)
        if shared:
            # Now, while a device copies: once it has, everything waits for the originals to be freed.
            moves += _views(members, group, target)
        placements.append(Placement(number, offset))
    free_originals()
    return placements


def byte_view_of(members: Sequence[torch.Tensor], group: StorageGroup) -> torch.Tensor:
    """The bytes of a storage that one torch storage holds whole."""
    storage = members[0].untyped_storage()
    return byte_view(storage, group.start - storage.data_ptr(), group.nbytes)


def _copy(members: Sequence[torch.Tensor], group: StorageGroup, target: torch.Tensor) -> None:
    first = members[0].untyped_storage()
    if len(members) == 1 and first.data_ptr() <= group.start and group.end <= first.data_ptr() + first.nbytes():
        target.copy_(byte_view_of(members, group))  # nearly all of them
        return
    # Several torch storages may lie over the same memory; between them they cover the group.
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in members}
    for base, storage in storages.items():
        start, end = max(base, group.start), min(base + storage.nbytes(), group.end)
        target[start - group.start : end - group.start].copy_(byte_view(storage, start - base, end - start))


def _views(members: Sequence[torch.Tensor], group: StorageGroup, memory: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of a storage, with what it is to be over ``memory``, a copy of that storage."""
    storage = memory.untyped_storage()
    found = []
    for tensor in members:
        offset = (tensor.data_ptr() - group.start) // tensor.element_size()
        view = view_storage(storage, tensor.dtype, offset, tensor.shape, tensor.stride())
        view = torch._neg_view(view) if tensor.is_neg() else view
        found.append((tensor, torch.conj(view) if tensor.is_conj() else view))
    return found


def _move(moves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, view in moves:
            tensor.data = view  # keeps the object: whoever refers to this parameter goes on doing so
