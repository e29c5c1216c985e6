"""Host memory: sealed memfd segments that outlive their maker and are mapped without copying a byte.

A segment is filled through a shared mapping, then sealed: from there on no process, its maker included, can change it. Clients map
it ``MAP_PRIVATE``: reading shares the pages, a write takes a private copy of one page and nobody else sees it.

Tensors own their mapping: each keeps the ``mmap`` object that it was made from alive, and that object unmaps when its last
reference goes. Nothing here ever closes a mapping, since a closed mapping under a living tensor is a SIGSEGV.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import torch

from torchwcache.config import Access
from torchwcache.errors import SegmentError, SegmentMemoryError
from torchwcache.memory.available import available_nbytes
from torchwcache.memory.base import Layout, Seen
from torchwcache.memory.files_left import file_limit_error
from torchwcache.memory.reading import read_exactly, view_of_memory
from torchwcache.memory.seals import REQUIRED_SEALS, check_sealed

__all__ = ["HostMappedSegment", "HostMemory", "HostWritableSegment"]

_MIB = 1 << 20
_SEGMENT_MIN_NBYTES = 64 * _MIB
_SEGMENT_MAX_NBYTES = 2048 * _MIB
_SEGMENTS_WANTED = 16
_SEEN_NBYTES = _MIB
"""What is read at once where somebody looks on: it is still in the core's cache then."""

_MFD_NOEXEC_SEAL = 0x0008
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mprotect.restype = ctypes.c_int
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def _raise_memory(what: str, nbytes: int, error: OSError) -> NoReturn:
    """Turn the system's error about a segment into ours."""
    if (full := file_limit_error(what, error)) is not None:
        raise full from error
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        raise SegmentMemoryError(
            f"cannot {what} of {nbytes} bytes: no memory or address space left ({os.strerror(error.errno)}); nothing was published",
            nbytes=nbytes,
        ) from error
    raise SegmentError(f"cannot {what} of {nbytes} bytes: {error}", nbytes=nbytes) from error


def _map_over(address: int, nbytes: int, flags: int, fd: int) -> None:
    """Map ``fd`` over addresses that are ours already; what was mapped there goes in the same step."""
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, 0)
    if found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _map(fd: int, nbytes: int, flags: int) -> tuple[mmap.mmap, int]:
    """Map ``fd`` from its start; returns the owner of the mapping and its address.

    ``mmap.mmap(fd, ...)`` would duplicate the descriptor and keep it for as long as the mapping lives: one more for each segment
    in every client. So Python owns an anonymous reservation, and the segment is mapped over it.
    """
    owner = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    _map_over(address, nbytes, flags, fd)
    return owner, address


def _pristine(fd: int, nbytes: int) -> mmap.mmap:
    """A mapping of a sealed segment in which nothing can be written: what was published, whatever this process did to its own."""
    owner, address = _map(fd, nbytes, mmap.MAP_PRIVATE)
    _forbid_writing(address, nbytes)
    return owner


def _forbid_writing(address: int, nbytes: int) -> None:
    if _libc.mprotect(address, nbytes, mmap.PROT_READ) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class HostWritableSegment:
    """A memfd that this process is filling. Made by :meth:`HostMemory.allocate`."""

    def __init__(self, fd: int, nbytes: int, mapping: mmap.mmap, address: int, *, seal_timeout_s: float) -> None:
        self._fd = fd
        self._nbytes = nbytes
        self._mapping: mmap.mmap | None = mapping
        self._address = address
        self._seal_timeout_s = seal_timeout_s
        self._private = self._sealed = False

    @property
    def nbytes(self) -> int:
        """Size in bytes, a multiple of the page size."""
        return self._nbytes

    address = 0
    """Where it lies means nothing to other processes."""

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A one-dimensional uint8 tensor of ``nbytes`` elements at ``offset``, with a storage of its own.

        Until :meth:`seal` the memory is absent in forked children.

        Raises:
            SegmentError: The segment was closed.
            ValueError: The range lies outside the segment.
        """
        if self._mapping is None:
            raise SegmentError("this segment was closed")
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=offset)

    def offset_of(self, address: int) -> int | None:
        """Offset of an address within this segment, or ``None`` when it lies outside."""
        offset = address - self._address
        return offset if self._mapping is not None and 0 <= offset < self._nbytes else None

    def seal(self) -> int:
        """Make the bytes immutable for every process, this one included, and return the file descriptor.

        Tensors made before keep their addresses. A later write through them is this process's own, as it is for every client.

        Raises:
            SegmentError: Somebody else still holds a writable mapping (nothing is sealed then, and calling again is fine), or the
                segment was closed.
        """
        if self._mapping is None:
            raise SegmentError("this segment was closed")
        if not self._sealed:
            if not self._private:  # our own writable mapping, too, stands in the way of F_SEAL_WRITE
                try:
                    _map_over(self._address, self._nbytes, mmap.MAP_PRIVATE, self._fd)
                except OSError as error:
                    _raise_memory("seal a segment", self._nbytes, error)
                self._private = True
            self._add_seals()
            self._sealed = True
        return self._fd

    def _add_seals(self) -> None:
        # Never F_SEAL_FUTURE_WRITE, which succeeds at once: it leaves mappings that are writable already writable for ever.
        deadline = time.monotonic() + self._seal_timeout_s
        pause_s = 0.001
        while True:
            try:
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS)
                return
            except OSError as error:
                if error.errno != errno.EBUSY:
                    _raise_memory("seal a segment", self._nbytes, error)
                if time.monotonic() >= deadline:
                    raise SegmentError(
                        f"cannot seal a segment of {self._nbytes} bytes: for {self._seal_timeout_s:g} s another process has held a "
                        "writable mapping of it (a child that was forked while the model was loading?), or input/output on its "
                        "pages is under way; end that process, or start it by `spawn`",
                        nbytes=self._nbytes,
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    def mapped(self, *, access: Access = Access.COPY_ON_WRITE) -> HostMappedSegment:
        """The segment as any other process would see it, over the same addresses.

        Raises:
            SegmentError: It was not sealed yet, or was closed.
        """
        if self._mapping is None or not self._sealed:
            raise SegmentError("only a sealed segment that was not closed can be shown as a mapped one")
        try:
            pristine = _pristine(self._fd, self._nbytes)
            if access is Access.READONLY:
                _forbid_writing(self._address, self._nbytes)
            return HostMappedSegment(self._mapping, self._nbytes, pristine)
        except OSError as error:
            _raise_memory("map a segment", self._nbytes, error)

    def close(self) -> None:
        """Give up the descriptor. The mapping itself goes with its last tensor. Idempotent.

        Tensors of a segment that was never sealed are ordinary memory from now on: a forked child has them, as its own.
        """
        if self._mapping is not None:
            if not self._private and not sys.is_finalizing():
                # Not by MADV_DOFORK alone: what a child writes would show here.
                with contextlib.suppress(OSError):
                    _map_over(self._address, self._nbytes, mmap.MAP_PRIVATE, self._fd)
            self._mapping = None
            os.close(self._fd)

    def __enter__(self) -> HostWritableSegment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class HostMappedSegment:
    """A sealed memfd, mapped into this process. Made by :meth:`HostMemory.map`."""

    __slots__ = ("_mapping", "_nbytes", "_pristine")

    def __init__(self, mapping: mmap.mmap, nbytes: int, pristine: mmap.mmap) -> None:
        self._mapping = mapping
        self._nbytes = nbytes
        self._pristine = pristine

    address = 0
    """Where it lies means nothing to other processes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    def settle(self) -> None:
        """The bytes can be read as soon as they are mapped."""

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor of ``nbytes // dtype.itemsize`` elements at ``offset``, with a storage of its own.

        The tensor keeps the mapping alive; the last one to die unmaps it.

        Raises:
            ValueError: The range lies outside the segment.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def views(
        self, offsets: Sequence[int], nbytes: Sequence[int], kinds: Sequence[int], layouts: Sequence[Layout]
    ) -> list[torch.Tensor]:
        """Many tensors in one step: for each row one over the start of a storage of its own. See ``MappedSegment.views``."""
        parts = {kind: _parts(layouts[kind]) for kind in set(kinds)}
        mapping, made = self._mapping, []
        for offset, size, kind in zip(offsets, nbytes, kinds, strict=True):
            dtype, itemsize, shape, stride = parts[kind]
            count, rest = divmod(size, itemsize)
            if rest:  # bytes at the end that are no whole element belong to the storage, too
                storage = self.tensor(offset, size, torch.uint8).untyped_storage()
                made.append(torch.empty(0, dtype=dtype).set_(storage, 0, shape, stride))
                continue
            flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=offset)
            whole = len(shape) == 1 and shape[0] == count and stride[0] == 1
            made.append(flat if whole else flat.as_strided_(shape, stride))
        return made

    def is_modified(self, offset: int, nbytes: int) -> bool:
        """Whether this process wrote to those bytes of its mapping.

        They are compared with a second mapping that nobody can write to: it shows the published bytes.
        """
        if nbytes == 0:
            return False
        mine = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=offset)
        published = torch.frombuffer(self._pristine, dtype=torch.uint8, count=nbytes, offset=offset)
        return not torch.equal(mine, published)


def _parts(layout: Layout) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    return layout["dtype"], layout["dtype"].itemsize, layout["size"], layout["stride"]


class HostMemory:
    """Host memory behind :class:`torchwcache.memory.base.Memory`.

    Args:
        seal_timeout_s: How long :meth:`HostWritableSegment.seal` waits for somebody else's writable mapping to go.
    """

    kind = "memfd"
    device_id = "cpu"
    alignment = 64
    """As torch's own CPU allocator: vectorised kernels choose their path by it, and outputs must be equal bit for bit."""

    def __init__(self, *, seal_timeout_s: float = 5.0) -> None:
        self._seal_timeout_s = seal_timeout_s

    @property
    def device(self) -> torch.device:
        """``torch.device("cpu")``."""
        return torch.device("cpu")

    def available_nbytes(self) -> int:
        """Bytes that can be allocated now: the machine's and every control group's answer, the smallest of them."""
        return available_nbytes()

    def segment_nbytes(self, total_nbytes: int) -> int:
        """A sixteenth of the whole, at least 64 MiB, at most 2 GiB, in pages."""
        share = -(-total_nbytes // _SEGMENTS_WANTED)
        return _whole_pages(min(max(share, _SEGMENT_MIN_NBYTES), _SEGMENT_MAX_NBYTES))

    def allocate(self, nbytes: int, *, zeroed: bool = True) -> HostWritableSegment:
        """Make a new segment of at least ``nbytes`` bytes, filled with zeros in any case: the kernel gives no others.

        Huge pages are not asked for. Whether they would pay is not known: the kernel's default for shared memory
        (``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``never``) ignores the request, so it could not be measured.

        Raises:
            SegmentMemoryError: There is not enough memory.
            FileLimitError: There are no file descriptors left.
        """
        if nbytes <= 0:
            raise ValueError(f"a segment needs at least one byte, not {nbytes}")
        size = _whole_pages(nbytes)
        if size > (available := self.available_nbytes()):
            raise SegmentMemoryError(
                f"cannot make a segment of {size} bytes: {available} bytes are available (machine and control groups, less a "
                "reserve); nothing was published. Evict entries (`torchwcache evict`) or free memory",
                nbytes=size,
                available=available,
            )
        with contextlib.ExitStack() as undo:
            try:
                fd = _memfd()
                undo.callback(os.close, fd)
                os.ftruncate(fd, size)
                mapping, address = _map(fd, size, mmap.MAP_SHARED)
                # A forked child (a data loader's worker) would inherit a writable mapping, and as long as it lives the segment
                # could not be sealed. Between the two calls a fork in another thread still can: sealing retries.
                mapping.madvise(mmap.MADV_DONTFORK)
            except OSError as error:
                _raise_memory("make a segment", size, error)
            undo.pop_all()
        return HostWritableSegment(fd, size, mapping, address, seal_timeout_s=self._seal_timeout_s)

    def map(self, fd: int, nbytes: int, *, access: Access = Access.COPY_ON_WRITE) -> HostMappedSegment:
        """Map a committed segment, after checking that it is sealed and as large as its entry says. Does not consume ``fd``.

        Raises:
            SegmentError: The descriptor is not an immutable segment of ``nbytes`` bytes.
            SegmentMemoryError: The address space is exhausted.
        """
        if nbytes <= 0:
            raise SegmentError(f"an entry names a segment of {nbytes} bytes")
        check_sealed(fd, nbytes)
        try:
            mapping, address = _map(fd, nbytes, mmap.MAP_PRIVATE)
            # Lowered afterwards, so that Python still takes the buffer for a writable one: torch would warn of it otherwise.
            if access is Access.READONLY:
                _forbid_writing(address, nbytes)
            pristine = _pristine(fd, nbytes)
        except OSError as error:
            _raise_memory("map a segment", nbytes, error)
        return HostMappedSegment(mapping, nbytes, pristine)

    def map_all(
        self, fds: Sequence[int], sizes: Sequence[int], *, access: Access = Access.COPY_ON_WRITE, addresses: Sequence[int] = ()
    ) -> list[HostMappedSegment]:
        """:meth:`map` for each segment of an entry. ``addresses`` mean nothing here.

        Raises:
            SegmentError: A descriptor is not an immutable segment of that many bytes.
            SegmentMemoryError: The address space is exhausted.
        """
        return [self.map(fd, nbytes, access=access) for fd, nbytes in zip(fds, sizes, strict=True)]

    def size_of(self, fd: int, stated: int = 0) -> int:
        """Real size in bytes of the segment behind a descriptor, whatever is stated.

        Raises:
            SegmentError: There is no such descriptor.
        """
        try:
            return os.fstat(fd).st_size
        except OSError as error:
            raise SegmentError(f"descriptor {fd} has no size: {error}") from error

    def read_file(self, fd: int, offset: int, target: torch.Tensor, seen: Seen | None = None) -> None:
        """Fill a contiguous tensor with the bytes of a file from ``offset`` on: straight into its memory, without the GIL.

        Args:
            fd: The file.
            offset: Of the first byte.
            target: What to fill.
            seen: Gets the bytes as they come, in order, in pieces that end at multiples of 1 MiB in the file.

        Raises:
            EOFError: The file ends before the tensor is full.
            ValueError: The tensor is not contiguous, or not on the CPU.
        """
        if not target.is_contiguous() or target.device.type != "cpu":
            raise ValueError(f"need a contiguous CPU tensor, not one of stride {target.stride()} on {target.device}")
        nbytes = target.numel() * target.element_size()
        if nbytes == 0:
            return
        view = view_of_memory(target.data_ptr(), nbytes)
        if seen is None:
            read_exactly(fd, offset, view)
            return
        start = 0
        while start < nbytes:
            stop = min(start + _SEEN_NBYTES - (offset + start) % _SEEN_NBYTES, nbytes)
            read_exactly(fd, offset + start, view[start:stop])
            seen(offset + start, view[start:stop])
            start = stop

    def synchronize(self) -> None:
        """Nothing is ever under way on the host."""

    def finish_copies(self) -> None:
        """Copies are done when they were made."""

    def release_freed(self) -> None:
        """Return memory that was freed by this process to the system (``malloc_trim``, where the C library has it)."""
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        # A kernel with vm.memfd_noexec=2 refuses anything that might be executed.
        return os.memfd_create("torchwcache", flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # before Linux 6.3 the flag is unknown
            raise
    return os.memfd_create("torchwcache", flags)
