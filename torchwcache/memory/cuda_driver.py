"""The CUDA driver calls that segments on a GPU are made of, each with its error as an exception.

Virtual memory management (``cuMemCreate`` and the rest) is not in torch. It is called through ``cuda.bindings.driver`` of the
package ``cuda-bindings``, imported only when a CUDA device is asked for. Nothing here knows torch: tests put a driver of their own
in its place.

Source of every rule named here: CUDA Driver API, "Virtual Memory Management", "Stream Management", "Context Management".
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torchwcache.errors import ConfigError, CudaError, SegmentError, SegmentMemoryError
from torchwcache.memory.files_left import file_limit_error

__all__ = ["CudaDevice", "load_driver"]

_NEEDED = (
    "cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap",
    "cuMemSetAccess", "cuMemUnmap", "cuMemAddressFree", "cuMemRelease", "cuDeviceGetUuid", "cuDevicePrimaryCtxRetain",
    "cuStreamIsCapturing",
)  # fmt: skip

INSTALL = 'pip install "cuda-bindings==13.*" (for a CUDA 12 build of torch: "cuda-bindings==12.*")'


def load_driver() -> Any:
    """``cuda.bindings.driver``, which imports without a GPU.

    Raises:
        ConfigError: It is not installed, or too old.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            f"weights on a GPU need the package cuda-bindings, which cannot be imported ({error}): {INSTALL}"
        ) from error
    missing = [name for name in _NEEDED if not hasattr(driver, name)]
    if missing:
        raise ConfigError(f"the installed cuda-bindings is too old: it lacks {', '.join(missing)}: {INSTALL}")
    return driver


class _Depth(threading.local):
    calls = 0


class CudaDevice:
    """One GPU: its memory, as physical allocations that have a file descriptor, and as addresses that lead to them.

    Every method that needs a context makes the device's primary one (torch's own) current while it runs, whatever thread calls it
    and whatever device that thread was using.

    Args:
        driver: ``cuda.bindings.driver``.
        ordinal: The device's number among those that this process sees (``CUDA_VISIBLE_DEVICES``), as torch counts them.

    Raises:
        ConfigError: The device or its driver cannot share memory by file descriptor.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        self.ordinal = ordinal
        self._depth = _Depth()
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        attributes = driver.CUdevice_attribute
        for name, what in (
            ("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory management"),
            ("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "memory with a file descriptor"),
        ):
            if not self._attribute(getattr(attributes, name)):
                raise ConfigError(f"CUDA device {ordinal} does not support {what}, so that nothing can be cached on it")
        # Not released: it is the context that torch works in, which lives as long as the process.
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        rdma = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
        self._properties = self._allocation_properties(gpu_direct_rdma=bool(rdma))
        flags = driver.CUmemAllocationGranularity_flags
        self.granularity = int(
            self._call("cuMemGetAllocationGranularity", self._properties, flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        )
        self._fd_type = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    @property
    def uuid(self) -> str:
        """The device's UUID (a MIG instance's own), the same in every process whatever devices it sees and in which order."""
        # In CUDA 12 the first version of the call answers for the whole GPU under MIG; in CUDA 13 there is only the second.
        name = "cuDeviceGetUuid_v2" if hasattr(self._driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return str(uuid.UUID(bytes=bytes(self._call(name, self._device).bytes)))

    # ---- physical memory -----------------------------------------------------------------------------------------------------

    def create(self, nbytes: int) -> Any:
        """Allocate ``nbytes`` bytes (a multiple of the granularity); returns a handle, to be given to :meth:`release`.

        Raises:
            SegmentMemoryError: The device has no memory left.
        """
        with self._current():
            return self._call("cuMemCreate", nbytes, self._properties, 0, nbytes=nbytes)

    def export(self, handle: Any) -> int:
        """A file descriptor that keeps the allocation alive. It is not inherited by programs that this process starts.

        Raises:
            FileLimitError: This process has no file descriptors left.
        """
        with self._current():
            try:
                fd = int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))
            except SegmentError as error:
                _check_files_left(error)
                raise
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int) -> Any:
        """A handle to the allocation behind a descriptor, which is not consumed.

        Raises:
            SegmentError: It is no exported GPU memory, or that of a device that this process cannot use.
        """
        with self._current():
            try:
                return self._call("cuMemImportFromShareableHandle", fd, self._fd_type)
            except CudaError as error:
                raise SegmentError(f"descriptor {fd} leads to no GPU memory that this process can use: {error}") from error

    def location(self, handle: Any) -> int:
        """The ordinal of the device that an allocation lies on."""
        with self._current():
            return int(self._call("cuMemGetAllocationPropertiesFromHandle", handle).location.id)

    def release(self, handle: Any) -> None:
        """Let go of a handle. The memory lives as long as a mapping, a descriptor or another handle does, in any process."""
        with self._current():
            self._call("cuMemRelease", handle)

    def free_nbytes(self) -> int:
        """Bytes that nobody has allocated."""
        with self._current():
            return int(self._call("cuMemGetInfo")[0])

    def total_nbytes(self) -> int:
        """Bytes of the device."""
        with self._current():
            return int(self._call("cuMemGetInfo")[1])

    # ---- addresses -----------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, wish: int = 0) -> int:
        """Reserve addresses, at ``wish`` if that is free and not 0; returns where."""
        with self._current():
            return int(self._call("cuMemAddressReserve", nbytes, 0, wish, 0, nbytes=nbytes))

    def free_addresses(self, address: int, nbytes: int) -> None:
        """Give back what :meth:`reserve` gave."""
        with self._current():
            self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Make addresses lead to an allocation, whole. They can be used after :meth:`set_access`.

        Raises:
            SegmentError: The allocation is not of ``nbytes`` bytes: the driver maps whole ones only.
        """
        with self._current():
            self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def set_access(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Say what this process may do at mapped addresses: read, or read and write. May be changed at any time."""
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        flags = driver.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        with self._current():
            self._call("cuMemSetAccess", address, nbytes, [access], 1, nbytes=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        """Make addresses lead nowhere. Does *not* wait for kernels: one that still reads there dies, and the context with it."""
        with self._current():
            self._call("cuMemUnmap", address, nbytes)

    # ---- waiting -------------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for everything that was started on the device in this process.

        While a stream of it is being captured that is an error, and *ends the capture*: see :meth:`is_capturing`.
        """
        with self._current():
            self._call("cuCtxSynchronize")

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured into a graph. Asking disturbs nothing."""
        driver = self._driver
        with self._current():
            status = self._call("cuStreamIsCapturing", driver.CUstream(stream))
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    # ---- calling -------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        depth = self._depth
        if depth.calls == 0:
            self._call("cuCtxPushCurrent", self._context)
        depth.calls += 1
        try:
            yield
        finally:
            depth.calls -= 1
            if depth.calls == 0:
                self._driver.cuCtxPopCurrent()  # an error here would hide the one that matters

    def current(self) -> AbstractContextManager[None]:
        """Keep the device's context current over several calls, which are each a little faster then. Use no other device inside."""
        return self._current()

    def _attribute(self, attribute: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _allocation_properties(self, *, gpu_direct_rdma: bool) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.ordinal
        # Weights are what network cards read and write in multi-node serving: without the flag they could not.
        properties.allocFlags.gpuDirectRDMACapable = int(gpu_direct_rdma)
        return properties

    def _call(self, name: str, *arguments: Any, nbytes: int | None = None) -> Any:
        result, *values = getattr(self._driver, name)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            code = str(getattr(result, "name", result))
            text = f"{name} failed on CUDA device {self.ordinal}: {code}"
            if code == "CUDA_ERROR_OUT_OF_MEMORY":
                wanted = "" if nbytes is None else f" ({nbytes} bytes)"
                raise SegmentMemoryError(f"{text}{wanted}; nothing was published", nbytes=nbytes, call=name, code=code)
            raise CudaError(text, call=name, code=code)
        return values[0] if len(values) == 1 else tuple(values)


def _check_files_left(cause: SegmentError) -> None:
    """The driver reports a full table of descriptors as any other failure; the system says it plainly."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if (full := file_limit_error("make a segment", error)) is not None:
            raise full from cause
