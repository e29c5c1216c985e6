"""GPU memory that no process owns: segments made by CUDA virtual memory management, each with a file descriptor.

A segment is filled through a writable mapping; from :meth:`CudaWritableSegment.seal` on its maker can only read it, at the same
addresses, and so can every client. A kernel that writes to it fails, and takes the context of its own process with it: nobody else
sees anything. What CUDA does not have is a seal that the driver enforces on everybody: a process of the same user that was given
the descriptor and means harm can map it for writing.

The descriptor keeps the physical memory alive, also where no CUDA process is left.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from torchwcache.config import Access
from torchwcache.errors import ConfigError, SegmentError, SegmentMemoryError
from torchwcache.memory.base import Layout, Seen
from torchwcache.memory.cuda_driver import CudaDevice, load_driver
from torchwcache.memory.cuda_mapping import CudaMapping, Reservation, Unmapping, create_segment, map_segments
from torchwcache.memory.staging import StagedReads

__all__ = ["CudaMappedSegment", "CudaMemory", "CudaWritableSegment", "cuda_device"]

_MIB = 1 << 20
_GIB = 1 << 30
_SEGMENT_MIN_NBYTES = 64 * _MIB
_SEGMENT_MAX_NBYTES = 4096 * _MIB
_SEGMENTS_WANTED = 24
"""Each costs a descriptor and up to 0.1 ms at every attach; the largest is what a publish needs beside the weights."""

_FIRST_ADDRESS, _LAST_ADDRESS = 0x300000000000, 0x500000000000
"""Where segments are put: 32 TiB in which neither the heap, nor libraries, nor torch's allocators lie, whose addresses the driver
chooses near the top of the address space. So the same address is free in the next process too."""
_ADDRESSES_NBYTES = 512 * _GIB
"""How many a producer reserves, so that all its segments are neighbours. They cost nothing."""

_RESERVE_SHARE = 256
_RESERVE_MAX_NBYTES = 512 * _MIB
"""Kept back from what is free: the process that fills the last segment must still be able to work."""


@functools.cache
def cuda_device(ordinal: int) -> CudaDevice:
    """The device behind ``torch.device("cuda", ordinal)``.

    Raises:
        ConfigError: cuda-bindings is missing, or the device cannot share memory.
    """
    driver = load_driver()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return CudaDevice(driver, ordinal)


def _is_capturing(device: CudaDevice) -> bool:
    current = torch.cuda.current_stream(device.ordinal).cuda_stream
    return any(device.is_capturing(stream) for stream in (current, *_pool_streams(device.ordinal)))


_POOL_STREAMS = 32
_POOL_PRIORITIES = 4
_CUDA = 1


@functools.cache
def _pool(ordinal: int) -> tuple[Any, ...]:
    """The streams that torch hands out, again and again the same few, as torch's objects: the driver has no call that lists them.

    They are named by their ids, which makes none of them: all together take 70 MB of the device, and a program that never asked for
    a stream has none. Source of the layout: ``c10/cuda/CUDAStream.cpp``, "StreamId assignment".
    """
    found: list[Any] = []
    for priority in range(1, _POOL_PRIORITIES + 1):
        for number in range(_POOL_STREAMS):
            stream_id = number << 5 | priority << 1 | 1
            found.append(torch.cuda.Stream(stream_id=stream_id, device_index=ordinal, device_type=_CUDA))  # type: ignore[no-untyped-call]
    return tuple(found)


def _pool_streams(ordinal: int) -> list[int]:
    """Handles of those of them that exist."""
    handles: list[int] = []
    with contextlib.suppress(RuntimeError):  # so many priorities this torch does not have
        for stream in _pool(ordinal):
            if handle := stream.cuda_stream:
                handles.append(handle)
    return handles


_unmapping = Unmapping(_is_capturing)


def _whole(mapping: CudaMapping, device: torch.device) -> torch.UntypedStorage:
    """All bytes of a mapping as one storage, which keeps the mapping alive, as do the slices that are made of it.

    Torch keeps the Python object of a storage, with its attributes, for as long as anything in torch refers to the storage itself.
    ``torch.as_tensor`` by ``__cuda_array_interface__`` would do the same, and asks the driver about the address: 0.1 ms each.
    """
    storage: Any = _construct_storage(mapping.address, device, mapping.nbytes)
    storage._torchwcache_mapping = mapping
    return storage  # type: ignore[no-any-return]


_construct_storage = torch._C._construct_storage_from_data_pointer


class CudaWritableSegment:
    """GPU memory that this process is filling. Made by :meth:`CudaMemory.allocate`."""

    def __init__(self, fd: int, mapping: CudaMapping, memory: CudaMemory) -> None:
        self._memory = memory
        self._storage: torch.UntypedStorage | None = _whole(mapping, memory.device)
        self._fd = fd
        self._mapping: CudaMapping | None = mapping  # from here on the descriptor is this object's to close
        self._nbytes, self._address = mapping.nbytes, mapping.address
        self._sealed = False

    @property
    def nbytes(self) -> int:
        """Size in bytes, a multiple of the device's granularity."""
        return self._nbytes

    @property
    def address(self) -> int:
        """Where it is mapped in this process: what clients ask for too."""
        return self._address

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """A one-dimensional uint8 tensor of ``nbytes`` elements at ``offset``, with a storage of its own.

        Raises:
            SegmentError: The segment was closed.
            ValueError: The range lies outside the segment.
        """
        if self._storage is None:
            raise SegmentError("this segment was closed")
        return _tensor(self._storage, offset, nbytes, torch.uint8)

    def offset_of(self, address: int) -> int | None:
        """Offset of an address within this segment, or ``None`` when it lies outside."""
        offset = address - self._address
        return offset if self._storage is not None and 0 <= offset < self._nbytes else None

    def seal(self) -> int:
        """Wait until everything written is there, then take away this process's own leave to write; returns the descriptor.

        Raises:
            SegmentError: The segment was closed, or the driver failed.
        """
        if self._mapping is None:
            raise SegmentError("this segment was closed")
        if not self._sealed:
            self._memory.synchronize()
            self._mapping.set_access(writable=False)
            self._sealed = True
        return self._fd

    def mapped(self, *, access: Access = Access.COPY_ON_WRITE) -> CudaMappedSegment:
        """The segment as any other process would see it, over the same addresses. It is read-only, whatever ``access`` says.

        Raises:
            SegmentError: It was not sealed yet, or was closed.
        """
        if self._storage is None or not self._sealed:
            raise SegmentError("only a sealed segment that was not closed can be shown as a mapped one")
        return CudaMappedSegment(self._storage, self._address, None)

    def close(self) -> None:
        """Give up the descriptor. The mapping itself goes with its last tensor. Idempotent."""
        if self._mapping is not None:
            self._mapping = self._storage = None
            os.close(self._fd)

    def __enter__(self) -> CudaWritableSegment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            self.close()


class _Opening:
    """Makes mapped segments readable in a thread of its own: the driver writes page tables meanwhile, and Python makes tensors."""

    def __init__(self, device: CudaDevice, ranges: Sequence[tuple[int, int]], mappings: Sequence[CudaMapping]) -> None:
        self._device, self._ranges = device, ranges
        self._mappings = list(mappings)  # so that they stay while this runs
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="torchwcache-open", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for address, nbytes in self._ranges:
                self._device.set_access(address, nbytes, writable=False)
        except BaseException as error:  # the top of a thread: whoever waits gets it
            self._error = error

    def wait(self) -> None:
        """Wait; raises what went wrong."""
        if (thread := self._thread) is not None:
            thread.join()
            self._thread = None
            self._mappings.clear()
        if self._error is not None:
            raise SegmentError(f"a segment could not be made readable: {self._error}") from self._error


class CudaMappedSegment:
    """A committed piece of GPU memory, mapped read-only into this process. Made by :meth:`CudaMemory.map_all`."""

    __slots__ = ("_device", "_mapping", "_opening", "_storage", "address")

    def __init__(self, storage: torch.UntypedStorage, address: int, opening: _Opening | None) -> None:
        self._storage, self.address, self._opening = storage, address, opening
        self._mapping, self._device = storage._torchwcache_mapping, storage.device  # type: ignore[attr-defined]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._storage.nbytes()

    def settle(self) -> None:
        """Wait until the bytes can be read.

        Raises:
            SegmentError: The driver refused.
        """
        if self._opening is not None:
            self._opening.wait()
            self._opening = None

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor of ``nbytes // dtype.itemsize`` elements at ``offset``, with a storage of its own.

        The tensor keeps the mapping alive; the last one to die unmaps it.

        Raises:
            ValueError: The range lies outside the segment.
        """
        self.settle()
        return _tensor(self._storage, offset, nbytes, dtype)

    def views(
        self, offsets: Sequence[int], nbytes: Sequence[int], kinds: Sequence[int], layouts: Sequence[Layout]
    ) -> list[torch.Tensor]:
        """Many tensors in one step: for each row one over the start of a storage of its own. See ``MappedSegment.views``."""
        # This is the hot loop of an attach, and runs in C but for one line. A storage made from its address (see ``_whole``) takes
        # less time than a slice of the segment's; and torch's own way to make a tensor over a storage (for replaying CUDA graphs,
        # ``torch/_inductor/cudagraph_trees.py``) half the time of ``set_``.
        storages: list[Any] = list(map(_construct_storage, map(self.address.__add__, offsets), repeat(self._device), nbytes))
        mapping = self._mapping
        for storage in storages:
            storage._torchwcache_mapping = mapping
        return list(map(_make_view, map(layouts.__getitem__, kinds), storages))

    def is_modified(self, offset: int, nbytes: int) -> bool:
        """Never: a write fails."""
        return False


def _set_view(layout: Layout, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=layout["dtype"], device=layout["device"])
    return empty.set_(storage, 0, layout["size"], layout["stride"])


_make_view = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", _set_view)


def _tensor(storage: torch.UntypedStorage, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    if offset < 0 or nbytes < 0 or offset + nbytes > storage.nbytes():
        raise ValueError(f"bytes {offset} to {offset + nbytes} lie outside a segment of {storage.nbytes()} bytes")
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    # A slice of a storage is a storage of its own, which keeps the one it was cut from alive.
    return empty.set_(storage[offset : offset + nbytes], 0, (nbytes // dtype.itemsize,), (1,)) if nbytes else empty


class CudaMemory:
    """Memory of one GPU behind :class:`torchwcache.memory.base.Memory`.

    Args:
        device: ``"cuda"`` (the current device) or ``"cuda:N"``, as torch names it.

    Raises:
        ConfigError: torch sees no such device.
    """

    kind = "cuda"
    alignment = 512
    """As torch's own CUDA allocator: kernels choose their path by alignment, and outputs must be equal bit for bit."""

    def __init__(self, device: str | torch.device = "cuda") -> None:
        wanted = torch.device(device)
        if torch.version.hip is not None:
            raise ConfigError(
                f"device={str(device)!r}: this is torch for ROCm, on whose GPUs nothing can be cached yet: use mode=off"
            )
        if not torch.cuda.is_available():
            if torch.version.cuda is None:
                why = "this torch was built without CUDA: install one that was built with it"
            else:
                why = "torch sees no CUDA device: see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            raise ConfigError(f"device={str(device)!r}: {why}")
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device={str(device)!r}: this process sees {torch.cuda.device_count()} CUDA devices, from 0 on")
        self._torch_device = torch.device("cuda", index)
        self._reads = StagedReads(self._torch_device)
        # By chance, so that two entries in one process rarely want the same place; clients ask for the producer's.
        self._first_address = random.SystemRandom().randrange(_FIRST_ADDRESS, _LAST_ADDRESS, _GIB)
        self._addresses: Reservation | None = None

    @property
    def device(self) -> torch.device:
        """``torch.device("cuda", index)``."""
        return self._torch_device

    @property
    def _device(self) -> CudaDevice:
        return cuda_device(self._torch_device.index)

    @property
    def device_id(self) -> str:
        """The UUID of the GPU, or of the MIG instance: what ``nvidia-smi -L`` shows behind ``GPU-`` or ``MIG-``.

        Raises:
            ConfigError: cuda-bindings is missing, or the device cannot share memory.
        """
        return self._device.uuid

    def available_nbytes(self) -> int:
        """Bytes that nobody has allocated, and those that torch's allocator in this process holds unused; less a small reserve."""
        index = self._torch_device.index
        unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        return max(0, self._free_nbytes() + unused)

    def _free_nbytes(self) -> int:
        reserve = min(self._device.total_nbytes() // _RESERVE_SHARE, _RESERVE_MAX_NBYTES)
        return self._device.free_nbytes() - reserve

    def segment_nbytes(self, total_nbytes: int) -> int:
        """A twenty-fourth of the whole, at least 64 MiB, at most 4 GiB, in units of the device's granularity."""
        share = -(-total_nbytes // _SEGMENTS_WANTED)
        return self._whole_units(min(max(share, _SEGMENT_MIN_NBYTES), _SEGMENT_MAX_NBYTES))

    def _whole_units(self, nbytes: int) -> int:
        unit = self._device.granularity
        return -(-nbytes // unit) * unit

    def allocate(self, nbytes: int, *, zeroed: bool = True) -> CudaWritableSegment:
        """Make a new segment of at least ``nbytes`` bytes.

        Args:
            nbytes: How many are needed.
            zeroed: Fill it with zeros. Without it the contents are undefined.

        Raises:
            SegmentMemoryError: There is not enough memory.
            FileLimitError: There are no file descriptors left.
        """
        if nbytes <= 0:
            raise ValueError(f"a segment needs at least one byte, not {nbytes}")
        size = self._whole_units(nbytes)
        if size > self._free_nbytes():
            self.release_freed()
        if size > (available := self._free_nbytes()):
            raise SegmentMemoryError(
                f"cannot make a segment of {size} bytes: {max(available, 0)} bytes are available on {self.device} (less a "
                "reserve); nothing was published. Evict entries (`torchwcache evict`) or free memory",
                nbytes=size,
                available=max(available, 0),
            )
        if self._addresses is None:
            self._addresses = Reservation(self._device, _ADDRESSES_NBYTES, self._first_address)
        fd, mapping = create_segment(self._device, size, _unmapping, within=self._addresses)
        try:
            segment = CudaWritableSegment(fd, mapping, self)
        except BaseException:
            os.close(fd)
            raise
        if zeroed:
            with torch.cuda.device(self.device):
                segment.tensor(0, size).zero_()
                # Whoever fills it may do so on another stream.
                torch.cuda.current_stream().synchronize()
        return segment

    def map_all(
        self, fds: Sequence[int], sizes: Sequence[int], *, access: Access = Access.COPY_ON_WRITE, addresses: Sequence[int] = ()
    ) -> list[CudaMappedSegment]:
        """Map the segments of an entry read-only, at ``addresses`` where those are free. Does not consume the descriptors.

        The bytes can be read when ``settle`` of each segment has returned.

        Raises:
            SegmentError: A descriptor does not lead to memory of exactly that size on this device.
        """
        mappings, ranges = map_segments(self._device, fds, sizes, _unmapping, wishes=addresses)
        opening = _Opening(self._device, ranges, mappings)
        return [CudaMappedSegment(_whole(mapping, self.device), mapping.address, opening) for mapping in mappings]

    def map(self, fd: int, nbytes: int, *, access: Access = Access.COPY_ON_WRITE, address: int = 0) -> CudaMappedSegment:
        """:meth:`map_all` for one segment."""
        return self.map_all([fd], [nbytes], access=access, addresses=[address] if address else [])[0]

    def size_of(self, fd: int, stated: int) -> int:
        """``stated``: no call tells the size behind a descriptor, but the driver maps only whole allocations (:meth:`map_all`)."""
        return stated

    def read_file(self, fd: int, offset: int, target: torch.Tensor, seen: Seen | None = None) -> None:
        """Fill a contiguous tensor on this device with the bytes of a file from ``offset`` on, through pinned host memory.

        Raises:
            EOFError: The file ends before the tensor is full.
            ValueError: The tensor is not contiguous, or not on this device.
        """
        if not target.is_contiguous() or target.device != self.device:
            raise ValueError(f"need a contiguous tensor on {self.device}, not one of stride {target.stride()} on {target.device}")
        if target.numel():
            self._reads.read(fd, offset, target, seen)

    def synchronize(self) -> None:
        """Wait for everything that this process started on the device.

        Raises:
            SegmentError: A kernel failed, or a stream is being captured into a graph meanwhile.
        """
        if _is_capturing(self._device):
            raise SegmentError(f"a CUDA graph is being captured on {self.device}: publish before or after that")
        self._device.synchronize()

    def finish_copies(self) -> None:
        """Wait for the thread's current stream, unless it is being captured: then whoever captures has said in which order."""
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).synchronize()

    def release_freed(self) -> None:
        """Return memory that was freed by this process to the device (``torch.cuda.empty_cache``)."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            torch.cuda.empty_cache()
