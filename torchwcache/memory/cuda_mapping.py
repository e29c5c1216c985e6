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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchwcache.errors import CudaError, SegmentError
from torchwcache.memory.cuda_driver import CudaDevice

__all__ = ["CudaMapping", "Reservation", "Unmapping", "create_segment", "map_segments"]

_LEAST_RESERVED_NBYTES = 2 << 30
"""The driver places small reservations within ranges of its own, whatever address is wished for; large ones where they are wanted.
Addresses cost nothing: there are 128 TiB of them."""
_LOOK_AGAIN_S = 0.05


class Reservation:
    """Addresses that nobody else in this process gets, and that lead nowhere until something is mapped there.

    Mappings within it refer to it: it is given back after the last of them.

    Args:
        device: Whose memory will be mapped there.
        nbytes: How many addresses.
        wish: Where, if that is free; 0 for anywhere.
    """

    __slots__ = ("_mapped", "_pid", "_taken", "_unused", "address", "device", "nbytes")

    def __init__(self, device: CudaDevice, nbytes: int, wish: int = 0) -> None:
        self.device, self.nbytes = device, max(nbytes, _LEAST_RESERVED_NBYTES)
        self._pid, self._taken = os.getpid(), 0
        self._mapped: list[None] = []  # one for each mapping: appending and popping are atomic, which counting is not
        self._unused = False
        self.address: int | None = None
        self.address = device.reserve(self.nbytes, wish)

    def take(self, nbytes: int) -> int | None:
        """The next ``nbytes`` addresses, or ``None`` when there are not so many left."""
        if self.address is None or self._taken + nbytes > self.nbytes:
            return None
        self._taken += nbytes
        return self.address + self._taken - nbytes

    def enter(self) -> None:
        """Something is mapped here."""
        self._mapped.append(None)

    def leave(self) -> None:
        """One mapping less."""
        with contextlib.suppress(IndexError):  # called by finalizers, which must not raise
            self._mapped.pop()
        if self._unused and not self._mapped:
            self.close()

    def close(self) -> None:
        """Give the addresses back, at which nothing may be mapped any more. Idempotent."""
        address, self.address = self.address, None
        if address is not None and os.getpid() == self._pid:  # in a forked child the context is the parent's, and unusable
            # A context that a faulty kernel has destroyed refuses everything; its addresses go with the process.
            with contextlib.suppress(SegmentError):
                self.device.free_addresses(address, self.nbytes)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A garbage collection finalizes a cycle in any order: mappings within may still be there, and the last one closes this.
        self._unused = True
        try:
            if not self._mapped:
                self.close()
        except Exception:
            if not is_finalizing():  # then modules lose their names
                raise


class Unmapping:
    """Gives addresses back, one device at a time, once nothing can be using them.

    Args:
        is_capturing: Says whether any stream of a device is being captured into a graph.
    """

    def __init__(self, is_capturing: Callable[[CudaDevice], bool]) -> None:
        self._is_capturing = is_capturing
        self._pending: collections.deque[tuple[Reservation, int, int]] = collections.deque()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """How many mappings wait."""
        return len(self._pending)

    def add(self, reservation: Reservation, address: int, nbytes: int) -> None:
        """Give a mapping back now, or as soon as it can be. Never raises: it is called by finalizers."""
        self._pending.append((reservation, address, nbytes))
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
        while self._pending:
            # Only what is there before the wait: others may start kernels, and let go, in the middle of this.
            found = [self._pending.popleft() for _ in range(len(self._pending))]
            devices = {reservation.device.ordinal: reservation.device for reservation, _, _ in found}
            idle = {ordinal for ordinal, device in devices.items() if self._wait_for_kernels(device)}
            for item in found:
                if item[0].device.ordinal in idle:
                    self._give_back(*item)
                else:
                    waiting.append(item)
        self._pending.extend(waiting)
        return not waiting

    @staticmethod
    def _give_back(reservation: Reservation, address: int, nbytes: int) -> None:
        with contextlib.suppress(SegmentError):  # as in Reservation.close
            reservation.device.unmap(address, nbytes)
        reservation.leave()

    def _wait_for_kernels(self, device: CudaDevice) -> bool:
        """Whether nothing can be using the device's mappings any more."""
        for may_not_be in (self._is_capturing, CudaDevice.synchronize):
            try:
                if may_not_be(device):
                    return False
            except (SegmentError, RuntimeError) as error:
                # A capture began in between, or on a stream that torch does not know; a dead context refuses everything.
                if getattr(error, "code", "").startswith("CUDA_ERROR_STREAM_CAPTURE"):
                    return False
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
        self._thread = None  # from here on whoever adds something starts another one
        if not self.drain():
            self._start_thread()


class CudaMapping:
    """Addresses that lead to one segment. Whoever refers to this object keeps them, as every tensor over them does."""

    __slots__ = ("__weakref__", "_pid", "_reservation", "_unmapping", "address", "nbytes")

    def __init__(self, reservation: Reservation, address: int, nbytes: int, unmapping: Unmapping) -> None:
        self.address, self.nbytes = address, nbytes
        self._reservation, self._unmapping = reservation, unmapping
        self._pid = os.getpid()
        reservation.enter()

    def set_access(self, *, writable: bool) -> None:
        """Change what this process may do there; addresses stay."""
        self._reservation.device.set_access(self.address, self.nbytes, writable=writable)

    def __del__(self, getpid: Callable[[], int] = os.getpid, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # In a forked child the context is the parent's, and unusable.
        if getpid() != self._pid:
            return
        try:
            self._unmapping.add(self._reservation, self.address, self.nbytes)
        except Exception:
            # While the interpreter ends, modules lose their names; the process's end unmaps what this could not.
            if not is_finalizing():
                raise


def create_segment(
    device: CudaDevice, nbytes: int, unmapping: Unmapping, *, within: Reservation | None = None
) -> tuple[int, CudaMapping]:
    """Allocate memory with a descriptor, and map it for writing; returns both. What fails leaves nothing behind.

    Args:
        device: Where.
        nbytes: A multiple of the device's granularity.
        unmapping: Gives the addresses back in the end.
        within: Where to map it, if there is room; in a reservation of its own otherwise.

    Raises:
        SegmentMemoryError: The device has no memory left.
        FileLimitError: There are no descriptors left.
        CudaError: Anything else that the driver says.
    """
    with device.current(), contextlib.ExitStack() as undo:
        handle = device.create(nbytes)
        with contextlib.ExitStack() as release:
            release.callback(device.release, handle)  # in any case: descriptor and mapping keep the memory
            fd = device.export(handle)
            undo.callback(os.close, fd)
            address = within.take(nbytes) if within is not None else None
            if within is None or address is None:
                within = Reservation(device, nbytes)
                undo.callback(within.close)
                address = within.take(nbytes)
                assert address is not None
            _map(device, address, nbytes, handle, undo)
            device.set_access(address, nbytes, writable=True)
        undo.pop_all()
    return fd, CudaMapping(within, address, nbytes, unmapping)


def map_segments(
    device: CudaDevice, fds: Sequence[int], sizes: Sequence[int], unmapping: Unmapping, *, wishes: Sequence[int] = ()
) -> tuple[list[CudaMapping], list[tuple[int, int]]]:
    """Map committed segments. What fails leaves nothing behind; descriptors are not consumed.

    Segments that are neighbours where they are wanted become neighbours, wherever that is: one call makes them readable.

    Args:
        device: Where they lie.
        fds: Their descriptors.
        sizes: Their sizes in bytes.
        unmapping: Gives the addresses back in the end.
        wishes: The address for each; empty for any.

    Returns:
        The mappings, and the ranges ``(address, nbytes)`` that are to be made readable by :meth:`CudaDevice.set_access`.

    Raises:
        SegmentError: A descriptor does not lead to memory of exactly that many bytes on this device.
    """
    mapped: list[tuple[Reservation, int, int]] = []
    ranges: list[tuple[int, int]] = []
    with device.current(), contextlib.ExitStack() as undo:
        for first, last in _runs(sizes, wishes):
            reservation = Reservation(device, sum(sizes[first:last]), wishes[first] if wishes else 0)
            undo.callback(reservation.close)
            for fd, nbytes in zip(fds[first:last], sizes[first:last], strict=True):
                address = reservation.take(nbytes)
                assert address is not None
                handle = device.import_fd(fd)
                with contextlib.ExitStack() as release:
                    release.callback(device.release, handle)
                    if (where := device.location(handle)) != device.ordinal:
                        raise SegmentError(
                            f"a segment lies on CUDA device {where}, its entry says device {device.ordinal}", nbytes=nbytes
                        )
                    _map(device, address, nbytes, handle, undo)
                mapped.append((reservation, address, nbytes))
            assert reservation.address is not None
            ranges.append((reservation.address, sum(sizes[first:last])))
        undo.pop_all()
    return [CudaMapping(*item, unmapping) for item in mapped], ranges


def _runs(sizes: Sequence[int], wishes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each run of neighbours begins, and one past where it ends."""
    first = 0
    for i in range(1, len(sizes) + 1):
        if i == len(sizes) or (wishes and wishes[i] != wishes[i - 1] + sizes[i - 1]):
            yield first, i
            first = i


def _map(device: CudaDevice, address: int, nbytes: int, handle: Any, undo: contextlib.ExitStack) -> None:
    try:
        device.map(address, nbytes, handle)
    except CudaError as error:
        raise SegmentError(
            f"a segment cannot be mapped as one of {nbytes} bytes on CUDA device {device.ordinal}, as its entry says: {error}",
            nbytes=nbytes,
        ) from error
    undo.callback(device.unmap, address, nbytes)
