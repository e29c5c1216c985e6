"""The fake driver is no other than the real one, as far as that can be seen without a GPU; and its books can be wrong."""

from __future__ import annotations

import inspect
import os
import re

import pytest
from support import fake_cuda
from support.fake_cuda import CALLS, ENUMS, MIB, NUMBERS, STRUCTS, CUresult, FakeDriver, Left

from torchwcache.memory import cuda_driver


@pytest.fixture
def real():
    return pytest.importorskip("cuda.bindings.driver")


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_the_parameters_of_the_real_one(real, name):
    assert [*inspect.signature(getattr(real, name)).parameters] == [*inspect.signature(getattr(FakeDriver, name)).parameters][1:]


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_every_enum_has_the_values_of_the_real_one(real, kind):
    theirs = getattr(real, kind.__name__)
    assert {member.name: int(member) for member in kind} == {member.name: int(getattr(theirs, member.name)) for member in kind}


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_struct_has_fields_of_the_real_one(real, kind):
    theirs, ours = getattr(real, kind.__name__)(), kind()
    assert set(kind.__slots__) <= set(dir(theirs))
    for name in kind.__slots__:
        nested = getattr(ours, name)
        for inner in getattr(nested, "__slots__", ()):
            assert hasattr(getattr(theirs, name), inner)
        if not hasattr(nested, "__slots__"):
            assert getattr(theirs, name) == nested, f"{name} of a new {kind.__name__}"


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: kind.__name__)
def test_every_number_is_one(real, kind):
    assert int(getattr(real, kind.__name__)(5)) == int(kind(5)) == 5


def test_the_real_driver_has_what_is_asked_of_it(real):
    assert [name for name in cuda_driver._NEEDED if not hasattr(real, name)] == []


def test_the_fake_has_every_name_that_the_code_uses():
    source = inspect.getsource(cuda_driver)
    used = set(re.findall(r"""["'.](cu[A-Z]\w+|CU[a-z]\w+)\b""", source))
    offered = {*CALLS, *(kind.__name__ for kind in (*ENUMS, *STRUCTS, *NUMBERS))}
    assert {"cuMemCreate", "cuCtxPopCurrent", "CUmemAllocationProp"} <= used <= offered


# ---- the books can be wrong --------------------------------------------------------------------------------------------------


class Plain:
    """One mapped allocation, made by calls."""

    def __init__(self):
        self.fake = fake = FakeDriver()
        prop = fake_cuda.CUmemAllocationProp(type=1, requestedHandleTypes=1)
        prop.location.type = 1
        fake.cuCtxPushCurrent(0)
        (_, self.handle) = fake.cuMemCreate(2 * MIB, prop, 0)
        (_, self.fd) = fake.cuMemExportToShareableHandle(self.handle, 1, 0)
        (_, self.address) = fake.cuMemAddressReserve(4 * MIB, 0, 0, 0)
        fake.cuMemMap(self.address, 2 * MIB, 0, self.handle, 0)
        access = fake_cuda.CUmemAccessDesc(flags=1)
        access.location.type = 1
        fake.cuMemSetAccess(self.address, 2 * MIB, [access], 1)

    def unmap(self):
        return self.fake.cuMemUnmap(self.address, 2 * MIB)


@pytest.fixture
def plain():
    made = Plain()
    yield made
    os.close(made.fd)


def test_what_is_left_is_counted(plain):
    fake = plain.fake
    assert (fake.faults, fake.left()) == ([], Left(1, 1, 1, 1, (1,)))
    copy = os.dup(plain.fd)
    assert fake.left().descriptors == 2
    fake.cuMemRelease(plain.handle)
    plain.unmap()
    fake.cuMemAddressFree(plain.address, 4 * MIB)
    fake.cuCtxPopCurrent()
    assert fake.left() == Left(descriptors=2)
    assert fake.used_nbytes(0) == 2 * MIB, "the descriptor keeps the memory"
    os.close(copy)
    assert fake.left() == Left(descriptors=1)


def test_unmapping_under_a_kernel_is_a_fault_that_kills_the_context(plain):
    plain.fake.launch(0, plain.address + 100)
    assert plain.unmap() == (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    assert len(plain.fake.faults) == 1
    assert plain.fake.cuCtxSynchronize() == (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)


def test_a_kernel_ends_with_synchronizing(plain):
    kernel = plain.fake.launch(0, plain.address)
    assert plain.fake.is_running(kernel)
    plain.fake.cuCtxSynchronize()
    assert not plain.fake.is_running(kernel)
    assert plain.unmap() == (CUresult.CUDA_SUCCESS,)
    assert plain.fake.faults == []


@pytest.mark.parametrize(
    "what", ["twice", "without a context", "another size", "released twice", "freed while mapped", "read after"]
)
def test_faults(plain, what):
    fake = plain.fake
    if what == "twice":
        plain.unmap()
        plain.unmap()
    elif what == "without a context":
        fake.cuCtxPopCurrent()
        assert plain.unmap() == (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
    elif what == "another size":
        fake.cuMemUnmap(plain.address, MIB)
    elif what == "released twice":
        fake.cuMemRelease(plain.handle)
        fake.cuMemRelease(plain.handle)
    elif what == "freed while mapped":
        fake.cuMemAddressFree(plain.address, 4 * MIB)
    else:
        plain.unmap()
        fake.launch(0, plain.address)
    assert len(fake.faults) == 1


def test_synchronizing_breaks_a_capture(plain):
    fake = plain.fake
    fake.begin_capture(0, 9)
    assert fake.cuCtxSynchronize() == (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    assert (fake.broken, fake.end_capture(9)) == ([9], False)


@pytest.mark.parametrize("after", [0, 2])
def test_a_call_fails_when_told_to(after):
    fake = FakeDriver()
    with fake.failing(CUresult.CUDA_ERROR_UNKNOWN, after=after) as failure:
        results = [fake.cuInit(0)[0] for _ in range(4)]
    assert [result == CUresult.CUDA_ERROR_UNKNOWN for result in results] == [i == after for i in range(4)]
    assert failure.failed == "cuInit"
    assert fake.cuInit(0) == (CUresult.CUDA_SUCCESS,)
