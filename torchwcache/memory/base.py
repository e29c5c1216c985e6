"""The seam between torchwcache and the memory that holds weights: nothing outside ``memory/`` knows which kind it handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torchwcache.config import Access

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "MappedSegment", "Memory", "Seen", "WritableSegment"]

Layout: TypeAlias = dict[str, Any]
"""What a tensor is besides its storage, as torch's own functions take it: ``dtype``, ``device``, and in elements ``size``,
``stride`` and ``storage_offset``, which is 0."""

Seen: TypeAlias = Callable[[int, memoryview], None]
"""Called with an offset in a file, and the bytes that were just read there; they are used before it returns."""


class WritableSegment(Protocol):
    """A piece of fd-backed memory that this process is filling. Nobody else can see it before :meth:`seal`."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, a multiple of the memory's granularity."""

    @property
    def address(self) -> int:
        """Where it is mapped in this process, for clients that ask for the same place; 0 where they cannot."""

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A one-dimensional uint8 tensor of ``nbytes`` elements at ``offset``, with a storage of its own.

        The tensor keeps the mapping alive, also after :meth:`close`.
        """

    def offset_of(self, address: int) -> int | None:
        """Offset of an address within this segment, or ``None`` when it lies outside."""

    def seal(self) -> int:
        """Make the bytes immutable for every process, this one included, and return the file descriptor.

        Addresses stay valid: tensors made by :meth:`tensor` go on reading the same bytes. The segment keeps owning the
        descriptor. Idempotent.

        Raises:
            SegmentError: Somebody else still holds a writable mapping.
        """

    def mapped(self, *, access: Access = Access.COPY_ON_WRITE) -> MappedSegment:
        """The segment as any other process would see it, over the same addresses; only after :meth:`seal`, before :meth:`close`."""

    def close(self) -> None:
        """Give up the descriptor. The mapping itself is freed with its last tensor. Idempotent."""


class MappedSegment(Protocol):
    """A committed piece of memory, mapped into this process; its bytes never change."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def address(self) -> int:
        """Where it is mapped in this process; 0 where that means nothing to other processes."""

    def settle(self) -> None:
        """Wait until its bytes can be read; tensors may be made before.

        Raises:
            SegmentError: They cannot.
        """

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor of ``nbytes // dtype.itemsize`` elements at ``offset``, with a storage of its own.

        The tensor keeps the mapping alive; the last one to die unmaps it.
        """

    def views(
        self, offsets: Sequence[int], nbytes: Sequence[int], kinds: Sequence[int], layouts: Sequence[Layout]
    ) -> list[torch.Tensor]:
        """Many tensors in one step: for each row one over the start of a storage of its own, as :meth:`tensor` makes it.

        May be called before :meth:`settle`; the tensors may be read after it only. Does not check the ranges:
        ``manifest.validate`` did.

        Args:
            offsets: Where each storage starts, in bytes.
            nbytes: How long it is.
            kinds: The number of the layout of its tensor.
            layouts: What tensors there are.
        """

    def is_modified(self, offset: int, nbytes: int) -> bool:
        """Whether this process wrote to those bytes of its mapping. The published bytes are what they were in any case."""


class Memory(Protocol):
    """One kind of memory on one device."""

    @property
    def kind(self) -> str:
        """``"memfd"`` or ``"cuda"``."""

    @property
    def device(self) -> torch.device:
        """Where tensors made from this memory live, as this process names it."""

    @property
    def device_id(self) -> str:
        """The same device as every process names it: ``"cpu"``, or a UUID."""

    @property
    def alignment(self) -> int:
        """Offsets of storages within a segment are multiples of this many bytes."""

    def available_nbytes(self) -> int:
        """How many bytes could be allocated now without harming the machine (cgroup limits included)."""

    def segment_nbytes(self, total_nbytes: int) -> int:
        """A good segment size for that many bytes in all: few segments, each small against the whole."""

    def allocate(self, nbytes: int, *, zeroed: bool = True) -> WritableSegment:
        """Make a new segment of at least ``nbytes`` bytes, filled with zeros unless that is not needed (``zeroed=False``).

        Raises:
            SegmentMemoryError: There is not enough memory.
            FileLimitError: There are no file descriptors left.
        """

    def map_all(
        self, fds: Sequence[int], sizes: Sequence[int], *, access: Access = Access.COPY_ON_WRITE, addresses: Sequence[int] = ()
    ) -> Sequence[MappedSegment]:
        """Map the committed segments of an entry, after checking that each is what its entry says. Consumes no descriptor.

        Args:
            fds: Their descriptors.
            sizes: Their sizes in bytes.
            access: What this process's own write does, where the memory leaves a choice.
            addresses: Where they are wanted; empty for anywhere. Another place is no error.

        Raises:
            SegmentError: A descriptor is not an immutable segment of that many bytes.
        """

    def size_of(self, fd: int, stated: int) -> int:
        """Real size in bytes of the segment behind a descriptor; ``stated`` where only :meth:`map_all` can tell, and checks."""

    def read_file(self, fd: int, offset: int, target: torch.Tensor, seen: Seen | None = None) -> None:
        """Fill a contiguous tensor in this memory with the bytes of a file from ``offset`` on.

        Args:
            fd: The file.
            offset: Of the first byte.
            target: What to fill.
            seen: Gets the bytes as they come, in order, in pieces that end at multiples of 1 MiB in the file.

        Raises:
            EOFError: The file ends before the tensor is full.
        """

    def synchronize(self) -> None:
        """Wait until everything that this process started on the device is done."""

    def finish_copies(self) -> None:
        """Wait for the copies that this thread just made out of segments, so that they can be used on any stream."""

    def release_freed(self) -> None:
        """Return memory that was freed by this process to the system, as far as its allocator can."""
