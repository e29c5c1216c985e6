"""Segments on a GPU are made whole or not at all, whatever call fails (D13); against a fake driver."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import pickle
import resource

import pytest
from support.fake_cuda import GIB, MIB, CUmemAccess_flags, CUresult, FakeDevice, FakeDriver, Left

from torchwcache.errors import CudaError, FileLimitError, SegmentError, SegmentMemoryError
from torchwcache.memory.cuda_driver import CudaDevice
from torchwcache.memory.cuda_mapping import Reservation, Unmapping, create_segment, map_segments

NBYTES = 4 * MIB
CODES = ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_UNKNOWN"]


class Gpu:
    """A device over a fake driver, and one committed segment."""

    def __init__(self, **options):
        self.fake = FakeDriver(FakeDevice(), FakeDevice(uuid=b"\1" * 16), **options)
        self.device = CudaDevice(self.fake, 0)
        self.unmapping = Unmapping(lambda device: False)

    def create(self, nbytes=NBYTES, **options):
        return create_segment(self.device, nbytes, self.unmapping, **options)

    def map(self, fd, nbytes=NBYTES, **options):
        ((mapping,), _) = self.map_all([fd], [nbytes], **options)
        return mapping

    def map_all(self, fds, sizes, **options):
        return map_segments(self.device, fds, sizes, self.unmapping, **options)

    @contextlib.contextmanager
    def committed(self):
        """A descriptor, as a client gets it: nothing else holds the memory."""
        fd, mapping = self.create()
        del mapping
        try:
            yield fd
        finally:
            os.close(fd)


@pytest.fixture
def gpu():
    made = Gpu()
    yield made
    assert made.fake.faults == []
    assert made.fake.left() == Left()


# ---- what is made ------------------------------------------------------------------------------------------------------------


def test_what_a_segment_consists_of(gpu):
    fd, mapping = gpu.create()
    assert gpu.fake.left() == Left(mappings=1, reservations=1, descriptors=1)
    assert gpu.fake.used_nbytes(0) == NBYTES
    assert gpu.fake.mapped()[mapping.address].access == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    mapping.set_access(writable=False)
    assert gpu.fake.mapped()[mapping.address].access == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    os.close(fd)
    assert gpu.fake.used_nbytes(0) == NBYTES, "the mapping keeps the memory"
    del mapping
    assert gpu.fake.used_nbytes(0) == 0


def test_the_descriptor_alone_keeps_the_memory(gpu):
    with gpu.committed() as fd:
        assert gpu.fake.left() == Left(descriptors=1)
        assert gpu.fake.used_nbytes(0) == NBYTES
        copy = os.dup(fd)
    assert gpu.fake.used_nbytes(0) == NBYTES
    os.close(copy)
    assert gpu.fake.used_nbytes(0) == 0


def test_a_mapping_can_be_read_after_its_access_was_set_and_never_written(gpu):
    with gpu.committed() as fd:
        mapping = gpu.map(fd)
        assert gpu.fake.left() == Left(mappings=1, reservations=1, descriptors=1)
        assert gpu.fake.mapped()[mapping.address].access == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
        mapping.set_access(writable=False)
        assert gpu.fake.mapped()[mapping.address].access == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        del mapping


@pytest.mark.parametrize("inheritable", [False, True])
def test_no_program_inherits_the_descriptor(inheritable):
    fd, _ = Gpu(exports_inheritable=inheritable).create()
    assert not os.get_inheritable(fd)
    os.close(fd)


@pytest.mark.parametrize("nbytes", [2 * MIB, 2 * GIB, 3 * GIB])
def test_small_segments_have_room_around_them(gpu, nbytes):
    """The driver keeps to an address that is wished for only when much is reserved there."""
    fd, mapping = gpu.create(nbytes)
    assert gpu.fake.reserved() == {mapping.address: max(nbytes, 2 * GIB)}
    os.close(fd)


# ---- places ------------------------------------------------------------------------------------------------------------------

PLACE = 0x300000000000


def test_a_reservation_is_given_back_after_the_last_mapping_in_it(gpu):
    reservation = Reservation(gpu.device, 8 * GIB, PLACE)
    made = [gpu.create(within=reservation) for _ in range(3)]
    assert [mapping.address for _, mapping in made] == [PLACE + i * NBYTES for i in range(3)]
    assert gpu.fake.reserved() == {PLACE: 8 * GIB}
    del reservation
    while made:
        assert gpu.fake.left() == Left(mappings=len(made), reservations=1, descriptors=len(made))
        os.close(made.pop(0)[0])
    assert gpu.fake.left() == Left()


def test_a_reservation_is_closed_once(gpu):
    reservation = Reservation(gpu.device, NBYTES)
    reservation.close()
    reservation.close()
    assert reservation.take(NBYTES) is None
    assert len(gpu.fake.named("cuMemAddressFree")) == 1


def test_what_does_not_fit_goes_elsewhere(gpu):
    reservation = Reservation(gpu.device, 2 * GIB)
    made = [gpu.create(GIB + NBYTES, within=reservation) for _ in range(2)]
    assert len(gpu.fake.reserved()) == 2
    assert [mapping.address in gpu.fake.reserved() for _, mapping in made] == [True, True]
    for fd, _ in made:
        os.close(fd)


def test_a_segment_that_fails_leaves_the_reservation_to_others(gpu):
    reservation = Reservation(gpu.device, 8 * GIB)
    for name in ("cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"):
        with gpu.fake.failing(CUresult.CUDA_ERROR_UNKNOWN, name=name), pytest.raises(SegmentError):
            gpu.create(within=reservation)
        assert gpu.fake.left() == Left(reservations=1)
    fd, mapping = gpu.create(within=reservation)
    assert reservation.address <= mapping.address < reservation.address + reservation.nbytes
    os.close(fd)


def test_a_wish_is_granted_where_it_is_free(gpu):
    with gpu.committed() as fd:
        one = gpu.map(fd, wishes=[PLACE])
        assert one.address == PLACE
        two = gpu.map(fd, wishes=[PLACE])
        assert two.address != PLACE
        del one
        three = gpu.map(fd, wishes=[PLACE])
        assert three.address == PLACE
        del two, three


RUNS = {
    "nowhere": ([], [0, NBYTES, 2 * NBYTES], 1),
    "neighbours": ([PLACE, PLACE + NBYTES, PLACE + 2 * NBYTES], [0, NBYTES, 2 * NBYTES], 1),
    "a gap": ([PLACE, PLACE + NBYTES, PLACE + 4 * GIB], [0, NBYTES, 4 * GIB], 2),
    "apart": ([PLACE, PLACE + 8 * GIB, PLACE + 4 * GIB], [0, 8 * GIB, 4 * GIB], 3),
    "the same": ([PLACE, PLACE, PLACE], None, 3),
    "too near": ([PLACE, PLACE + 2 * NBYTES, PLACE + NBYTES], None, 3),
}


@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("taken", [False, True])
def test_neighbours_stay_neighbours(gpu, how, taken):
    wishes, offsets, count = RUNS[how]
    other = Reservation(gpu.device, NBYTES, PLACE) if taken else None
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(gpu.committed()) for _ in range(3)]
        mappings, ranges = gpu.map_all(fds, [NBYTES] * 3, wishes=wishes)
        assert len(ranges) == count
        assert sum(nbytes for _, nbytes in ranges) == 3 * NBYTES
        assert len({mapping.address for mapping in mappings}) == 3
        if offsets is not None and (count == 1 or not taken):
            assert [mapping.address - mappings[0].address for mapping in mappings] == offsets
            assert (mappings[0].address == PLACE) == (bool(wishes) and not taken)
        for address, nbytes in ranges:
            gpu.device.set_access(address, nbytes, writable=False)
        readable = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        assert [gpu.fake.mapped()[mapping.address].access for mapping in mappings] == [readable] * 3
        while mappings:
            mappings.pop()
            assert len(gpu.fake.mapped()) == len(mappings)
    del other


def test_nothing_to_map(gpu):
    assert gpu.map_all([], []) == ([], [])


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("wishes", [[], [PLACE, PLACE + NBYTES, PLACE + 4 * GIB]])
def test_one_that_cannot_be_mapped_takes_all_with_it(gpu, bad, wishes):
    with contextlib.ExitStack() as stack:
        fds = [stack.enter_context(gpu.committed()) for _ in range(3)]
        (end, other_end) = os.pipe()
        fds[bad] = end
        with pytest.raises(SegmentError, match=f"descriptor {end} leads to no GPU memory"):
            gpu.map_all(fds, [NBYTES] * 3, wishes=wishes)
        assert gpu.fake.left() == Left(descriptors=3)
        os.close(end)
        os.close(other_end)


# ---- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [NBYTES - 2 * MIB, NBYTES + 2 * MIB])
def test_a_segment_of_another_size(gpu, nbytes):
    with gpu.committed() as fd:
        with pytest.raises(SegmentError, match=rf"{nbytes} bytes.*cuMemMap.*CUDA_ERROR_NOT_SUPPORTED") as raised:
            gpu.map(fd, nbytes)
        assert raised.value.nbytes == nbytes
        assert gpu.fake.left() == Left(descriptors=1)


def test_a_segment_on_another_device(gpu):
    with gpu.committed() as fd:
        with pytest.raises(SegmentError, match=r"lies on CUDA device 0, its entry says device 1"):
            map_segments(CudaDevice(gpu.fake, 1), [fd], [NBYTES], gpu.unmapping)
        assert gpu.fake.left() == Left(descriptors=1)


@pytest.mark.parametrize("what", ["pipe", "memfd", "closed"])
def test_a_descriptor_of_something_else(gpu, what):
    ends = os.pipe() if what == "pipe" else (os.memfd_create("stranger"),)
    if what == "closed":
        os.close(ends[0])
    with pytest.raises(SegmentError, match=rf"descriptor {ends[0]} leads to no GPU memory.*cuMemImport\w+ .*CUDA_ERROR_UNKNOWN"):
        gpu.map(ends[0])
    for end in ends if what != "closed" else ():
        os.close(end)  # an error if it was consumed


def test_more_than_there_is(gpu):
    with pytest.raises(SegmentMemoryError, match=f"cuMemCreate.*CUDA_ERROR_OUT_OF_MEMORY.*{81 * GIB} bytes") as raised:
        gpu.create(81 * GIB)
    assert isinstance(raised.value, MemoryError)
    assert (raised.value.nbytes, raised.value.call, raised.value.code) == (81 * GIB, "cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")


@contextlib.contextmanager
def no_descriptors_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        filling = [os.open(os.devnull, os.O_RDONLY)]
        stack.callback(lambda: [os.close(fd) for fd in filling])
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(filling[0]))
        yield limit


def test_no_descriptors_left(gpu):
    with no_descriptors_left() as limit, pytest.raises(FileLimitError, match=f"ulimit -n is {limit}") as raised:
        gpu.create()
    assert raised.value.soft == limit
    assert raised.value.__cause__.call == "cuMemExportToShareableHandle"
    assert_survives_pickling(raised.value)


def test_a_failing_export_is_not_blamed_on_descriptors(gpu):
    with gpu.fake.failing(CUresult.CUDA_ERROR_UNKNOWN, name="cuMemExportToShareableHandle"), pytest.raises(CudaError) as raised:
        gpu.create()
    assert (raised.value.call, raised.value.code) == ("cuMemExportToShareableHandle", "CUDA_ERROR_UNKNOWN")


# ---- every call fails once ---------------------------------------------------------------------------------------------------


def assert_survives_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


def failures_of(action, code):
    """Fail each driver call of ``action`` in turn, with everything made anew; gives what the failure prevented, and the error.

    A call that makes a context current fails in the name of what was to be done in it.
    """
    for n in itertools.count():
        gpu = Gpu()
        with gpu.committed() as fd:
            first = len(gpu.fake.calls)
            action(gpu, fd)
            names = [call.name for call in gpu.fake.calls[first:]]
            with gpu.fake.failing(CUresult[code], after=n) as failure:
                error = None
                try:
                    action(gpu, fd)
                except SegmentError as found:
                    error = found
                    while found is not None:  # frames keep what they worked with
                        found = found.with_traceback(None).__context__
            if error is not None and "cuMemRelease" in (failure.failed, names[n + 1]):
                gc.collect()  # those in which an exit stack raised keep themselves
            if failure.failed is None:
                assert error is None
                return
            prevented = names[n + 1] if failure.failed == "cuCtxPushCurrent" else failure.failed
            yield gpu, failure.failed, prevented, error


def create(gpu, fd):
    made, mapping = gpu.create()
    os.close(made)
    del mapping


def map_it(gpu, fd):
    gpu.map(fd)


def create_at_once(gpu, fd):
    with gpu.device.current():
        create(gpu, fd)


def create_within(gpu, fd):
    reservation = Reservation(gpu.device, 4 * GIB)
    made, mapping = gpu.create(within=reservation)
    os.close(made)
    del mapping


def map_two(gpu, fd):
    gpu.map_all([fd, fd], [NBYTES] * 2, wishes=[PLACE, PLACE + 4 * GIB])


BEFORE = Left(descriptors=1)
UNDONE_BY_FINALIZER = {"cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("action", [create, create_at_once, create_within, map_it, map_two])
def test_whatever_call_fails_nothing_is_left(action, code):
    seen = set()
    for gpu, failed, prevented, error in failures_of(action, code):
        seen.add(failed)
        left = gpu.fake.left()
        if failed == "cuCtxPopCurrent":  # what was made current stays so, if the driver says so
            assert dataclasses.replace(left, contexts=()) == BEFORE
            continue
        if prevented in UNDONE_BY_FINALIZER:  # the segment was made: see test_cuda_unmapping
            assert error is None
            continue
        assert gpu.fake.faults == []
        # What the driver refuses to let go of stays; but nothing else does.
        assert left == dataclasses.replace(BEFORE, handles=int(prevented == "cuMemRelease")), (failed, prevented)
        assert failed in str(error)
        assert code in str(error)
        assert isinstance(error, SegmentMemoryError) == (code == "CUDA_ERROR_OUT_OF_MEMORY")
        assert_survives_pickling(error)
    made = {"cuMemCreate", "cuMemExportToShareableHandle", "cuMemSetAccess"}
    mapped = {"cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle"}
    assert seen >= {"cuCtxPushCurrent", "cuMemAddressReserve", "cuMemMap", "cuMemRelease"}
    assert seen >= (mapped if action in (map_it, map_two) else made)


@pytest.mark.parametrize("action", [create, map_it])
def test_errors_say_what_failed(action):
    for _, failed, prevented, error in failures_of(action, "CUDA_ERROR_INVALID_VALUE"):
        if failed == "cuCtxPopCurrent" or prevented in UNDONE_BY_FINALIZER:
            continue
        cause = error if isinstance(error, CudaError) else error.__cause__
        assert (cause.call, cause.code) == (failed, "CUDA_ERROR_INVALID_VALUE")
        assert "CUDA device 0" in str(error)


@pytest.mark.parametrize(
    ("when", "name"),
    [
        ("before", "cuMemExportToShareableHandle"),
        ("before", "cuMemAddressReserve"),
        ("before", "cuMemMap"),
        ("before", "cuMemSetAccess"),
        ("after", "cuMemSetAccess"),
        ("after", "cuMemRelease"),
    ],
)
def test_an_interrupt_leaves_nothing(gpu, when, name):
    hooks = getattr(gpu.fake, when)

    def interrupt(*arguments):
        del hooks[name]
        raise KeyboardInterrupt

    hooks[name] = interrupt
    with pytest.raises(KeyboardInterrupt):
        gpu.create()
