"""Addresses of this process that lead to GPU memory: made whole or not at all, and given back when no kernel can use them any more.

Torch's tensors own a :class:`CudaMapping`: the last one to die ends it. That may happen at any
moment, in any thread, in the middle of a stream capture, while the interpreter ends, in a forked child. So giving back is a matter
of its own, :class:`Unmapping`:

- The driver's ``cuMemUnmap`` does not wait for kernels; one that still reads there dies, and takes the process's context with it.
  So the device is synchronized first.
- Synchronizing while a stream is captured fails *and ends the capture*, whatever capture mode the thread is in. So it waits until
  no stream is. If the capturing thread is the very one that dropped the last tensor, waiting would be for ever: the addresses are
  put aside, and given back by whoever comes next, or by a thread that looks again.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from torchwcache.errors import CudaError, SegmentError
from torchwcache.memory.cuda_driver import CudaDevice

__all__ = ["CudaMapping", "Unmapping", "create_segment", "map_segment"]

_LEAST_RESERVED = 2 << 30
"""The driver places small reservations within ranges of its own, whatever address is wished for; large ones where they are wanted.
Addresses cost nothing: there are 128 TiB of them."""
_LOOK_AGAIN_S = 0.05


class Unmapping:
    """Gives addresses back, one device at a time, once nothing can be using them.

    Args:
        is_capturing: Says whether any stream of a device is being captured into a graph.
    """

    def __init__(self, is_capturing: Callable[[CudaDevice], bool]) -> None:
        self._is_capturing = is_capturing
        self._pending: collections.deque[tuple[CudaDevice, int, int, int]] = collections.deque()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """How many mappings wait."""
        return len(self._pending)

    def add(self, device: CudaDevice, address: int, nbytes: int, reserved_nbytes: int) -> None:
        """Give a mapping back now, or as soon as it can be. Never raises: it is called by finalizers."""
        self._pending.append((device, address, nbytes, reserved_nbytes))
        if not self.drain() and not sys.is_finalizing():  # a process that ends gives everything back by itself
            self._start_thread()

    def drain(self) -> bool:
        """Give back what can be; returns whether nothing is left."""
        # A garbage collection may run a finalizer, and so this method, inside of itself: a lock that waits would wait for ever.
        while self._pending and self._busy.acquire(blocking=False):
            try:
                if not self._drain_locked():
                    return False
            finally:
                self._busy.release()
        return not self._pending

    def _drain_locked(self) -> bool:
        waiting = []
        synchronized: set[int] = set()
        while self._pending:
            device, address, nbytes, reserved_nbytes = item = self._pending.popleft()
            if device.ordinal not in synchronized:
                if not self._wait_for_kernels(device):
                    waiting.append(item)
                    continue
                synchronized.add(device.ordinal)
            # A context that a faulty kernel has destroyed refuses everything; its addresses go with the process.
            with contextlib.suppress(SegmentError):
                device.unmap(address, nbytes)
                device.free_addresses(address, reserved_nbytes)
        self._pending.extend(waiting)
        return not waiting

    def _wait_for_kernels(self, device: CudaDevice) -> bool:
        try:
            if self._is_capturing(device):
                return False
            device.synchronize()
        except CudaError as error:
            # A capture began in between, or on a stream that torch does not know.
            return not error.code.startswith("CUDA_ERROR_STREAM_CAPTURE")
        except SegmentError:
            pass
        return True

    def _start_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # "can't start new thread" while the interpreter ends
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look_again, name="torchwcache-unmap", daemon=True)
                self._thread.start()

    def _look_again(self) -> None:
        pause = threading.Event()
        while not self.drain():
            pause.wait(_LOOK_AGAIN_S)


class CudaMapping:
    """Addresses that lead to one segment. Whoever refers to this object keeps them, as every tensor over them does."""

    __slots__ = ("__weakref__", "_device", "_pid", "_unmapping", "address", "nbytes", "reserved_nbytes")

    def __init__(self, device: CudaDevice, address: int, nbytes: int, reserved_nbytes: int, unmapping: Unmapping) -> None:
        self.address, self.nbytes, self.reserved_nbytes = address, nbytes, reserved_nbytes
        self._device, self._unmapping = device, unmapping
        self._pid = os.getpid()

    def set_access(self, *, writable: bool) -> None:
        """Change what this process may do there; addresses stay."""
        self._device.set_access(self.address, self.nbytes, writable=writable)

    def __del__(self, getpid: Callable[[], int] = os.getpid, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # In a forked child the context is the parent's, and unusable.
        if getpid() != self._pid:
            return
        try:
            self._unmapping.add(self._device, self.address, self.nbytes, self.reserved_nbytes)
        except Exception:
            # While the interpreter ends, modules lose their names; the process's end unmaps what this could not.
            if not is_finalizing():
                raise


def create_segment(device: CudaDevice, nbytes: int, unmapping: Unmapping, *, wish: int = 0) -> tuple[int, CudaMapping]:
    """Allocate memory with a descriptor, and map it for writing; returns both. What fails leaves nothing behind.

    Args:
        device: Where.
        nbytes: A multiple of the device's granularity.
        unmapping: Gives the addresses back in the end.
        wish: The address to map it at, if that is free; 0 for any.

    Raises:
        SegmentMemoryError: The device has no memory left.
        FileLimitError: There are no descriptors left.
        CudaError: Anything else that the driver says.
    """
    with contextlib.ExitStack() as undo:
        handle = device.create(nbytes)
        with contextlib.ExitStack() as release:
            release.callback(device.release, handle)  # in any case: descriptor and mapping keep the memory
            fd = device.export(handle)
            undo.callback(os.close, fd)
            address, reserved_nbytes = _map(device, handle, nbytes, wish, undo)
            device.set_access(address, nbytes, writable=True)
        undo.pop_all()
    return fd, CudaMapping(device, address, nbytes, reserved_nbytes, unmapping)


def map_segment(device: CudaDevice, fd: int, nbytes: int, unmapping: Unmapping, *, wish: int = 0) -> CudaMapping:
    """Map a committed segment. It can be read after ``set_access``. What fails leaves nothing behind; ``fd`` is not consumed.

    Raises:
        SegmentError: The descriptor does not lead to memory of exactly ``nbytes`` bytes on this device.
    """
    with contextlib.ExitStack() as undo:
        handle = device.import_fd(fd)
        with contextlib.ExitStack() as release:
            release.callback(device.release, handle)
            if (where := device.location(handle)) != device.ordinal:
                raise SegmentError(f"a segment lies on CUDA device {where}, its entry says device {device.ordinal}", nbytes=nbytes)
            address, reserved_nbytes = _map(device, handle, nbytes, wish, undo)
        undo.pop_all()
    return CudaMapping(device, address, nbytes, reserved_nbytes, unmapping)


def _map(device: CudaDevice, handle: Any, nbytes: int, wish: int, undo: contextlib.ExitStack) -> tuple[int, int]:
    """Reserve addresses and map; returns where, and how many bytes are reserved. ``undo`` takes both back."""
    reserved_nbytes = max(nbytes, _LEAST_RESERVED)
    address = device.reserve(reserved_nbytes, wish)
    undo.callback(device.free_addresses, address, reserved_nbytes)
    try:
        device.map(address, nbytes, handle)
    except CudaError as error:
        raise SegmentError(
            f"a segment cannot be mapped as one of {nbytes} bytes on CUDA device {device.ordinal}, as its entry says: {error}",
            nbytes=nbytes,
        ) from error
    undo.callback(device.unmap, address, nbytes)
    return address, reserved_nbytes
