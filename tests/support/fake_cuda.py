"""A stand-in for the module ``cuda.bindings.driver`` which keeps books instead of talking to a GPU.

:class:`FakeDriver` has the functions, enums and structs that ``torchwcache.memory.cuda_driver`` uses, under the same names; a test
compares them with the real package. Beyond what a driver does, it says what was done wrong (:attr:`FakeDriver.faults`) and what is
left (:meth:`FakeDriver.left`), and it fails, or calls back, when told to.

What it claims of the real driver was seen on an H200, or is from the CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1 << 20
GIB = 1 << 30


# ---- the real module's enums, as far as they are used ------------------------------------------------------------------------


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906
    CUDA_ERROR_UNKNOWN = 999


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUstreamCaptureStatus(enum.IntEnum):
    CU_STREAM_CAPTURE_STATUS_NONE = 0
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2


ENUMS = (
    CUresult,
    CUdevice_attribute,
    CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType,
    CUmemAllocationType,
    CUmemLocationType,
    CUmemAccess_flags,
    CUstreamCaptureStatus,
)


# ---- its structs, as far as they are used ------------------------------------------------------------------------------------
# With slots: setting a field that the fake does not have is an error, as it is with the real ones.


@dataclasses.dataclass(slots=True)
class CUmemLocation:
    type: int = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
    id: int = 0


@dataclasses.dataclass(slots=True)
class CUmemAllocationPropFlags:
    """In the real module a nameless struct, reached through ``CUmemAllocationProp.allocFlags``."""

    gpuDirectRDMACapable: int = 0


@dataclasses.dataclass(slots=True)
class CUmemAllocationProp:
    type: int = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
    requestedHandleTypes: int = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    location: CUmemLocation = dataclasses.field(default_factory=CUmemLocation)
    allocFlags: CUmemAllocationPropFlags = dataclasses.field(default_factory=CUmemAllocationPropFlags)


@dataclasses.dataclass(slots=True)
class CUmemAccessDesc:
    location: CUmemLocation = dataclasses.field(default_factory=CUmemLocation)
    flags: int = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


@dataclasses.dataclass(slots=True)
class CUuuid:
    bytes: Any = b"\0" * 16


class _Number(int):
    """The real ones are no subclasses of int, and convert to one."""


class CUstream(_Number):
    pass


class CUdevice(_Number):
    pass


class CUcontext(_Number):
    pass


class CUdeviceptr(_Number):
    pass


class CUmemGenericAllocationHandle(_Number):
    pass


STRUCTS = (CUmemLocation, CUmemAllocationProp, CUmemAccessDesc, CUuuid)
NUMBERS = (CUstream, CUdevice, CUcontext, CUdeviceptr, CUmemGenericAllocationHandle)


# ---- the books ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeDevice:
    """A GPU as this process sees it."""

    uuid: bytes = bytes(range(16))
    nbytes: int = 80 * GIB
    granularity: int = 2 * MIB
    vmm: bool = True
    fd: bool = True
    rdma: bool = True


@dataclasses.dataclass(eq=False)
class Allocation:
    ordinal: int
    nbytes: int
    properties: CUmemAllocationProp
    inodes: set[tuple[int, int]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class Mapping:
    address: int
    nbytes: int
    allocation: Allocation
    access: int = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


@dataclasses.dataclass(eq=False)
class Kernel:
    """Runs until its device is synchronized, or :meth:`FakeDriver.finish` is called."""

    ordinal: int
    addresses: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call: what was asked for, of which device the context was, in which thread, and what came out."""

    name: str
    arguments: tuple[Any, ...]
    context: int | None
    thread: int
    result: CUresult


@dataclasses.dataclass
class _Failure:
    after: int
    code: CUresult
    name: str | None
    thread: int
    forever: bool = False
    failed: str | None = None


@dataclasses.dataclass(frozen=True)
class Left:
    """What somebody did not give back."""

    handles: int = 0
    mappings: int = 0
    reservations: int = 0
    descriptors: int = 0
    contexts: tuple[int, ...] = ()
    """Depth of the context stack of each thread where it is not 0."""


_CURRENT_CONTEXT = {
    "cuMemGetInfo", "cuMemUnmap", "cuMemMap", "cuMemSetAccess", "cuMemAddressFree", "cuMemAddressReserve", "cuCtxSynchronize",
    "cuStreamIsCapturing",
}  # fmt: skip
"""Some of these work without a context on the real driver. Ours promises that each has that of its device."""


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Book a call, fail it when that was asked for, and let a hook run before it."""
    name = function.__name__

    @functools.wraps(function)
    def called(self: FakeDriver, *arguments: Any) -> tuple[Any, ...]:
        if (hook := self.before.get(name)) is not None:
            hook(*arguments)
        with self._lock:
            context = self._context()
            result: tuple[Any, ...]
            if (code := self._planned(name)) is not None:
                result = (code,)
            elif name in _CURRENT_CONTEXT and context is None:
                self.faults.append(f"{name} without a current context")
                result = (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
            elif name in _CURRENT_CONTEXT and context in self.dead:
                result = (self.dead[context],)
            else:
                found = function(self, *arguments)
                result = found if isinstance(found, tuple) else (found,)
            self.calls.append(Call(name, arguments, context, threading.get_ident(), result[0]))
        if (hook := self.after.get(name)) is not None:
            hook(*arguments)
        return result

    called.is_call = True  # type: ignore[attr-defined]
    return called


class FakeDriver:
    """``cuda.bindings.driver`` of one process.

    Attributes:
        devices: What it sees.
        calls: Every call, in order.
        faults: What no program may do, in words.
        broken: The streams whose capture somebody ended by synchronizing.
        before: Called with a call's arguments before it is made, by name.
        after: The same, when it was made.
        dead: Devices whose context refuses everything, with the code it does so with.
    """

    def __init__(self, *devices: FakeDevice, exports_inheritable: bool = False) -> None:
        self.devices = list(devices or [FakeDevice()])
        self.calls: list[Call] = []
        self.faults: list[str] = []
        self.broken: list[int] = []
        self.before: dict[str, Callable[..., None]] = {}
        self.after: dict[str, Callable[..., None]] = {}
        self.dead: dict[int, CUresult] = {}
        self._exports_inheritable = exports_inheritable
        self._lock = threading.RLock()
        self._numbers = itertools.count(0x1000)
        self._next_address = 0x700000000000
        self._handles: dict[int, Allocation] = {}
        self._exported: list[Allocation] = []
        self._mappings: dict[int, Mapping] = {}
        self._reservations: dict[int, int] = {}
        self._contexts: dict[int, list[int]] = {}
        self._kernels: list[Kernel] = []
        self._captures: dict[int, tuple[int, CUstreamCaptureStatus]] = {}
        self._failures: list[_Failure] = []
        for kind in (*ENUMS, *STRUCTS, *NUMBERS):
            setattr(self, kind.__name__, kind)

    # ---- what a test says ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def failing(self, code: CUresult, *, after: int = 0, name: str | None = None, forever: bool = False) -> Iterator[_Failure]:
        """Fail one call of this thread, after so many others (of that name), or that one and all later ones.

        Gives an object whose ``failed`` is the name of the call that was, or ``None``.
        """
        failure = _Failure(after, code, name, threading.get_ident(), forever)
        self._failures.append(failure)
        try:
            yield failure
        finally:
            self._failures.remove(failure)

    def launch(self, ordinal: int, *addresses: int) -> Kernel:
        """Start a kernel that reads there."""
        with self._lock:
            for address in addresses:
                mapping = self._mapping_at(address)
                if mapping is None or mapping.access == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE:
                    self._fault(ordinal, f"a kernel reads at {address:#x}, where nothing is readable")
            kernel = Kernel(ordinal, addresses)
            self._kernels.append(kernel)
            return kernel

    def finish(self, kernel: Kernel) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._kernels.remove(kernel)

    def begin_capture(self, ordinal: int, stream: int) -> None:
        with self._lock:
            self._captures[stream] = (ordinal, CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)

    def end_capture(self, stream: int) -> bool:
        """Whether there is a graph."""
        with self._lock:
            return self._captures.pop(stream)[1] == CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE

    def streams(self, ordinal: int) -> list[int]:
        """Those being captured, and one that is not."""
        with self._lock:
            return [7, *(stream for stream, (device, _) in self._captures.items() if device == ordinal)]

    @contextlib.contextmanager
    def using(self, ordinal: int) -> Iterator[None]:
        """This thread works on a device, as behind ``torch.cuda.set_device``."""
        stack = self._stack()
        stack.append(ordinal)
        try:
            yield
        finally:
            if stack.pop() != ordinal:
                self.faults.append("somebody left a context current")

    # ---- what a test asks ----------------------------------------------------------------------------------------------------

    def left(self) -> Left:
        with self._lock:
            return Left(
                len(self._handles),
                len(self._mappings),
                len(self._reservations),
                sum(len(self._open(one)) for one in self._exported),
                tuple(len(stack) for stack in self._contexts.values() if stack),
            )

    def used_nbytes(self, ordinal: int) -> int:
        with self._lock:
            held = {*self._handles.values(), *(one.allocation for one in self._mappings.values())}
            held.update(one for one in self._exported if self._open(one))
            return sum(one.nbytes for one in held if one.ordinal == ordinal)

    def mapped(self) -> dict[int, Mapping]:
        """What is mapped, by address."""
        return dict(self._mappings)

    def handles(self) -> list[int]:
        """What was created or imported, and not released."""
        return list(self._handles)

    def reserved(self) -> dict[int, int]:
        """Bytes reserved, by address."""
        return dict(self._reservations)

    def named(self, *names: str) -> list[Call]:
        """The calls of these names that succeeded."""
        return [call for call in self.calls if call.name in names and call.result == CUresult.CUDA_SUCCESS]

    def is_running(self, kernel: Kernel) -> bool:
        return kernel in self._kernels

    # ---- inside --------------------------------------------------------------------------------------------------------------

    def _stack(self) -> list[int]:
        return self._contexts.setdefault(threading.get_ident(), [])

    def _context(self) -> int | None:
        stack = self._stack()
        return stack[-1] if stack else None

    def _planned(self, name: str) -> CUresult | None:
        for failure in self._failures:
            if failure.thread != threading.get_ident() or failure.name not in (None, name):
                continue
            if failure.after == 0:
                if failure.failed is None or failure.forever:
                    failure.failed = name
                    return failure.code
            else:
                failure.after -= 1
        return None

    def _fault(self, ordinal: int, text: str) -> None:
        self.faults.append(text)
        self.dead[ordinal] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    def _mapping_at(self, address: int) -> Mapping | None:
        return next((one for one in self._mappings.values() if one.address <= address < one.address + one.nbytes), None)

    @staticmethod
    def _open(allocation: Allocation) -> list[int]:
        """The descriptors of this process that lead to an allocation, whoever duplicated them."""
        found = []
        for name in os.listdir("/proc/self/fd") if allocation.inodes else ():
            with contextlib.suppress(OSError):  # the one that lists
                status = os.stat(int(name))
                if (status.st_dev, status.st_ino) in allocation.inodes:
                    found.append(int(name))
        return found

    def _is_free(self, address: int, nbytes: int) -> bool:
        return all(address + nbytes <= start or start + size <= address for start, size in self._reservations.items())

    # ---- devices and contexts ------------------------------------------------------------------------------------------------

    @_call
    def cuInit(self, Flags: int) -> CUresult:
        return CUresult.CUDA_SUCCESS

    @_call
    def cuDeviceGet(self, ordinal: int) -> Any:
        if not 0 <= ordinal < len(self.devices):
            return CUresult.CUDA_ERROR_INVALID_DEVICE
        return CUresult.CUDA_SUCCESS, CUdevice(ordinal)

    @_call
    def cuDeviceGetAttribute(self, attrib: CUdevice_attribute, dev: CUdevice) -> Any:
        device = self.devices[dev]
        attributes = CUdevice_attribute
        return CUresult.CUDA_SUCCESS, {
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: int(device.vmm),
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: int(device.fd),
            attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: int(device.rdma),
        }[attrib]

    @_call
    def cuDeviceGetUuid(self, dev: CUdevice) -> Any:
        return CUresult.CUDA_SUCCESS, CUuuid(self.devices[dev].uuid)

    @_call
    def cuDevicePrimaryCtxRetain(self, dev: CUdevice) -> Any:
        return CUresult.CUDA_SUCCESS, CUcontext(dev)

    @_call
    def cuCtxPushCurrent(self, ctx: CUcontext) -> CUresult:
        self._stack().append(int(ctx))
        return CUresult.CUDA_SUCCESS

    @_call
    def cuCtxPopCurrent(self) -> Any:
        stack = self._stack()
        if not stack:
            self.faults.append("popped a context where none was")
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        return CUresult.CUDA_SUCCESS, CUcontext(stack.pop())

    @_call
    def cuCtxSynchronize(self) -> CUresult:
        ordinal = self._context()
        found = [stream for stream, (device, _) in self._captures.items() if device == ordinal]
        if found:
            for stream in found:
                self._captures[stream] = (self._captures[stream][0], CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED)
            self.broken.extend(found)
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        self._kernels = [kernel for kernel in self._kernels if kernel.ordinal != ordinal]
        return CUresult.CUDA_SUCCESS

    @_call
    def cuStreamIsCapturing(self, hStream: CUstream) -> Any:
        none = (-1, CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
        return CUresult.CUDA_SUCCESS, self._captures.get(int(hStream), none)[1]

    # ---- physical memory -----------------------------------------------------------------------------------------------------

    @_call
    def cuMemGetInfo(self) -> Any:
        ordinal = self._context()
        assert ordinal is not None
        total = self.devices[ordinal].nbytes
        return CUresult.CUDA_SUCCESS, total - self.used_nbytes(ordinal), total

    @_call
    def cuMemGetAllocationGranularity(self, prop: CUmemAllocationProp, option: int) -> Any:
        recommended = option == CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return CUresult.CUDA_SUCCESS, self.devices[prop.location.id].granularity if recommended else 64 << 10

    @_call
    def cuMemCreate(self, size: int, prop: CUmemAllocationProp, flags: int) -> Any:
        ordinal = prop.location.id
        device = self.devices[ordinal]
        if (
            size <= 0
            or size % device.granularity
            or prop.type != CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            or prop.location.type != CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            or prop.allocFlags.gpuDirectRDMACapable > device.rdma
        ):
            return CUresult.CUDA_ERROR_INVALID_VALUE
        if size > device.nbytes - self.used_nbytes(ordinal):
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        return CUresult.CUDA_SUCCESS, self._new_handle(Allocation(ordinal, size, copy.deepcopy(prop)))

    def _new_handle(self, allocation: Allocation) -> CUmemGenericAllocationHandle:
        handle = CUmemGenericAllocationHandle(next(self._numbers))
        self._handles[handle] = allocation
        return handle

    def _of(self, handle: CUmemGenericAllocationHandle, what: str) -> Allocation | None:
        allocation = self._handles.get(handle)
        if allocation is None:
            self.faults.append(f"{what} of a handle that was released")
        return allocation

    @_call
    def cuMemRelease(self, handle: CUmemGenericAllocationHandle) -> CUresult:
        if self._of(handle, "cuMemRelease") is None:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        del self._handles[handle]
        return CUresult.CUDA_SUCCESS

    @_call
    def cuMemExportToShareableHandle(self, handle: Any, handleType: int, flags: int) -> Any:
        allocation = self._of(handle, "cuMemExportToShareableHandle")
        kind = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        if allocation is None or not allocation.properties.requestedHandleTypes & kind or handleType != kind:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        try:
            fd = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
        except OSError:
            return CUresult.CUDA_ERROR_OPERATING_SYSTEM
        os.set_inheritable(fd, self._exports_inheritable)
        status = os.fstat(fd)
        allocation.inodes.add((status.st_dev, status.st_ino))
        if allocation not in self._exported:
            self._exported.append(allocation)
        return CUresult.CUDA_SUCCESS, fd

    @_call
    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: int) -> Any:
        try:
            status = os.fstat(osHandle)
        except OSError:
            return CUresult.CUDA_ERROR_UNKNOWN
        for allocation in self._exported:
            if (status.st_dev, status.st_ino) in allocation.inodes:
                return CUresult.CUDA_SUCCESS, self._new_handle(allocation)
        return CUresult.CUDA_ERROR_UNKNOWN

    @_call
    def cuMemGetAllocationPropertiesFromHandle(self, handle: Any) -> Any:
        allocation = self._of(handle, "cuMemGetAllocationPropertiesFromHandle")
        if allocation is None:
            return CUresult.CUDA_ERROR_INVALID_VALUE
        return CUresult.CUDA_SUCCESS, copy.deepcopy(allocation.properties)

    # ---- addresses -----------------------------------------------------------------------------------------------------------

    @_call
    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Any:
        if size <= 0 or size % (64 << 10):
            return CUresult.CUDA_ERROR_INVALID_VALUE
        address = addr
        if not address or not self._is_free(address, size):
            address, self._next_address = self._next_address, self._next_address + -(-size // GIB) * GIB
        self._reservations[address] = size
        return CUresult.CUDA_SUCCESS, CUdeviceptr(address)

    @_call
    def cuMemAddressFree(self, ptr: int, size: int) -> CUresult:
        if self._reservations.get(ptr) != size:
            self.faults.append(f"cuMemAddressFree of {size} bytes at {ptr:#x}, which were not reserved like that")
            return CUresult.CUDA_ERROR_INVALID_VALUE
        if mapped := [one for one in self._mappings if ptr <= one < ptr + size]:
            refused = {call.arguments[0] for call in self.calls if call.name == "cuMemUnmap"}
            if not refused.issuperset(mapped):  # those are the driver's fault
                self.faults.append(f"cuMemAddressFree at {ptr:#x}, where something is mapped")
            return CUresult.CUDA_ERROR_INVALID_VALUE
        del self._reservations[ptr]
        return CUresult.CUDA_SUCCESS

    @_call
    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Any, flags: int) -> CUresult:
        allocation = self._of(handle, "cuMemMap")
        reserved = any(start <= ptr and ptr + size <= start + nbytes for start, nbytes in self._reservations.items())
        if (
            allocation is None
            or not reserved
            or any(one.address < ptr + size and ptr < one.address + one.nbytes for one in self._mappings.values())
        ):
            self.faults.append(f"cuMemMap of {size} bytes at {ptr:#x}, which are not free and reserved")
            return CUresult.CUDA_ERROR_INVALID_VALUE
        if size != allocation.nbytes or offset:
            return CUresult.CUDA_ERROR_NOT_SUPPORTED
        self._mappings[int(ptr)] = Mapping(int(ptr), size, allocation)
        return CUresult.CUDA_SUCCESS

    @_call
    def cuMemSetAccess(self, ptr: int, size: int, desc: list[CUmemAccessDesc], count: int) -> CUresult:
        """Of one mapping, or of several neighbours at once, each whole."""
        (access,) = desc
        found = [one for address, one in sorted(self._mappings.items()) if ptr <= address and address + one.nbytes <= ptr + size]
        if count != 1 or sum(one.nbytes for one in found) != size:
            self.faults.append(f"cuMemSetAccess of {size} bytes at {ptr:#x}, which are not mapped like that")
            return CUresult.CUDA_ERROR_INVALID_VALUE
        where = {(CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, one.allocation.ordinal) for one in found}
        if {(access.location.type, access.location.id)} != where:
            return CUresult.CUDA_ERROR_INVALID_DEVICE
        for one in found:
            one.access = access.flags
        return CUresult.CUDA_SUCCESS

    @_call
    def cuMemUnmap(self, ptr: int, size: int) -> CUresult:
        mapping = self._mappings.get(ptr)
        if mapping is None or mapping.nbytes != size:
            self.faults.append(f"cuMemUnmap of {size} bytes at {ptr:#x}, which are not mapped like that")
            return CUresult.CUDA_ERROR_INVALID_VALUE
        ordinal = mapping.allocation.ordinal
        if self._context() != ordinal:
            self.faults.append(f"cuMemUnmap of device {ordinal}'s memory in the context of device {self._context()}")
        if any(ptr <= address < ptr + size for kernel in self._kernels for address in kernel.addresses):
            self._fault(ordinal, f"cuMemUnmap at {ptr:#x}, where a kernel reads")
            return CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
        del self._mappings[ptr]
        return CUresult.CUDA_SUCCESS


CALLS = tuple(name for name, value in vars(FakeDriver).items() if getattr(value, "is_call", False))
