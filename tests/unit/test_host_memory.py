"""Sealed memfd segments: what is shared, what is private, and who frees it (D12, D13, F13, F14, F21)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.roundtrip import mapped_segments

from torchwcache.config import Access
from torchwcache.errors import ConfigError, FileLimitError, SegmentError, SegmentMemoryError
from torchwcache.memory import host, reading
from torchwcache.memory.base import MappedSegment, Memory, WritableSegment
from torchwcache.memory.host import HostMemory
from torchwcache.memory.seals import REQUIRED_SEALS, check_sealed
from torchwcache.memory.select import memory_for

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(seal_timeout_s=0.3)


@pytest.fixture
def sealed(memory: HostMemory) -> Iterator[host.HostWritableSegment]:
    """One MiB of counted bytes, sealed."""
    with memory.allocate(MIB) as segment:
        segment.tensor(0, MIB).copy_(torch.arange(MIB) % 251)
        segment.seal()
        yield segment


def python(code: str, *args: object, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds)


@contextlib.contextmanager
def foreign_writer(fd: int, nbytes: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a writable shared mapping until its standard input closes."""
    child = python(
        """
        import mmap, sys
        mapping = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]), flags=mmap.MAP_SHARED)
        print("mapped", flush=True)
        sys.stdin.read()
        """,
        fd,
        nbytes,
        pass_fds=(fd,),
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "mapped\n"
        yield child


def maps_of(address: int) -> list[str]:
    """Lines of /proc/self/maps that cover an address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if int(line.split("-")[0], 16) <= address < int(re.split("[- ]", line)[1], 16)]


def smaps_of(address: int) -> dict[str, int]:
    """The kB fields of /proc/self/smaps for the mapping that holds an address."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside and line.endswith(" kB"):
            found[line.split(":")[0]] = int(line.split()[1])
    return found


def test_fits_the_seam(memory: HostMemory, sealed: host.HostWritableSegment) -> None:
    any_memory: Memory = memory
    writable: WritableSegment = sealed
    mapped: MappedSegment = memory.map(sealed.seal(), sealed.nbytes)
    assert (any_memory.kind, any_memory.device_id, any_memory.device) == ("memfd", "cpu", torch.device("cpu"))
    assert writable.nbytes == mapped.nbytes == MIB


def test_memory_for_names_the_device() -> None:
    assert memory_for("cpu").kind == "memfd"
    if torch.cuda.is_available():
        assert memory_for("cuda").kind == "cuda"
    else:
        with pytest.raises(ConfigError, match=r"device='cuda:0': (this torch was built without CUDA|torch sees no CUDA device)"):
            memory_for("cuda:0")
    with pytest.raises(ConfigError, match='"cpu"'):
        memory_for("mps")


def test_new_segment_is_zero_and_whole_pages(memory: HostMemory) -> None:
    with memory.allocate(PAGE + 1) as segment:
        assert segment.nbytes == 2 * PAGE
        assert not segment.tensor(0, segment.nbytes).any()
    with pytest.raises(ValueError, match="at least one byte"):
        memory.allocate(0)


def test_tensors_have_storages_of_their_own(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    written = sealed.tensor(64, 100)
    mapped = memory.map(sealed.seal(), MIB)
    read = mapped.tensor(128, 200, torch.bfloat16)
    assert written.untyped_storage().nbytes() == 100
    assert (read.shape, read.untyped_storage().nbytes(), read.storage_offset()) == ((100,), 200, 0)
    assert mapped.tensor(0, 0, torch.float16).shape == sealed.tensor(0, 0).shape == (0,)


def test_every_dtype_maps(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    mapped = memory.map(sealed.seal(), MIB)
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        tensor = mapped.tensor(64, 64, dtype)
        assert (tensor.dtype, tensor.untyped_storage().nbytes()) == (dtype, 64)
        assert tensor.data_ptr() % 64 == 0


def test_many_tensors_in_one_step_are_those_made_one_by_one(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    segment = memory.map(sealed.seal(), sealed.nbytes)
    layouts = [
        {"dtype": dtype, "device": memory.device, "size": size, "stride": stride, "storage_offset": 0}
        for dtype, size, stride in [
            (torch.uint8, (7,), (1,)), (torch.bfloat16, (2, 3), (3, 1)), (torch.bfloat16, (3, 2), (1, 3)), (torch.int32, (), ()),
        ]
    ]  # fmt: skip
    rows = [(0, 7, 0), (64, 12, 1), (128, 12, 2), (192, 4, 3), (256, 15, 1), (320, 9, 0)]  # two storages longer than their tensors
    offsets, sizes, kinds = zip(*rows, strict=True)
    for (offset, nbytes, kind), made in zip(rows, segment.views(offsets, sizes, kinds, layouts), strict=True):
        layout, storage = layouts[kind], made.untyped_storage()
        assert (made.dtype, tuple(made.shape), made.stride(), made.storage_offset()) == (
            layout["dtype"], layout["size"], layout["stride"], 0,
        )  # fmt: skip
        assert storage.nbytes() == nbytes
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        assert torch.equal(raw, segment.tensor(offset, nbytes, torch.uint8))
        assert storage.data_ptr() == segment.tensor(offset, nbytes, torch.uint8).data_ptr()


def test_out_of_bounds_is_refused(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    mapped = memory.map(sealed.seal(), MIB)
    with pytest.raises(ValueError, match="buffer"):
        sealed.tensor(MIB - 10, 11)
    with pytest.raises(ValueError, match="buffer"):
        mapped.tensor(MIB - 8, 16, torch.float32)


def test_offset_of(memory: HostMemory) -> None:
    with memory.allocate(PAGE) as segment:
        tensor = segment.tensor(256, 16)
        start = tensor.data_ptr() - 256
        assert segment.offset_of(tensor.data_ptr()) == 256
        assert segment.offset_of(start) == 0
        assert segment.offset_of(start - 1) is None
        assert segment.offset_of(start + PAGE) is None
    assert segment.offset_of(start) is None


# ---- sealing -----------------------------------------------------------------------------------------------------------------


def test_seal_keeps_addresses_and_is_idempotent(memory: HostMemory) -> None:
    with memory.allocate(MIB) as segment:
        tensor = segment.tensor(0, MIB).fill_(7)
        before = tensor.data_ptr()
        fd = segment.seal()
        assert segment.seal() == fd
        assert tensor.data_ptr() == before
        assert bool((tensor == 7).all())
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & REQUIRED_SEALS == REQUIRED_SEALS
        check_sealed(fd, MIB)


def test_nothing_changes_a_sealed_segment(sealed: host.HostWritableSegment) -> None:
    fd = sealed.seal()
    for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, PAGE), lambda: os.ftruncate(fd, 2 * MIB)):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, MIB, flags=mmap.MAP_SHARED)
    # also not by opening it anew
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as reopened, pytest.raises(PermissionError):
        reopened.write(b"x")
    with pytest.raises(PermissionError):  # nor can a seal be added or taken back
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_producers_write_after_seal_is_its_own(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    mine = sealed.tensor(0, 4)
    other = memory.map(sealed.seal(), MIB).tensor(0, 4, torch.uint8)
    mine.fill_(99)
    assert mine.tolist() == [99] * 4
    assert other.tolist() == [0, 1, 2, 3]
    assert os.pread(sealed.seal(), 4, 0) == bytes([0, 1, 2, 3])


def test_seal_waits_for_a_foreign_writer_then_fails_and_can_be_tried_again(memory: HostMemory) -> None:
    with memory.allocate(MIB) as segment:
        tensor = segment.tensor(0, 4).fill_(5)
        with foreign_writer(segment._fd, MIB):
            started = time.monotonic()
            with pytest.raises(SegmentError, match="writable mapping") as caught:
                segment.seal()
            assert time.monotonic() - started >= 0.3
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.__cause__.errno == errno.EBUSY
            with pytest.raises(SegmentError, match="lacks"):
                memory.map(segment._fd, MIB)
        memory_again = memory.map(segment.seal(), MIB)
        assert memory_again.tensor(0, 4, torch.uint8).tolist() == tensor.tolist() == [5] * 4


def test_seal_succeeds_once_the_foreign_writer_is_gone_in_time() -> None:
    with HostMemory(seal_timeout_s=30).allocate(MIB) as segment, foreign_writer(segment._fd, MIB) as child:
        segment.tensor(0, 4).fill_(5)
        released = python("import sys, time, os, signal; time.sleep(0.3); os.kill(int(sys.argv[1]), signal.SIGKILL)", child.pid)
        with released:
            check_sealed(segment.seal(), MIB)


FORKING = """
    import os, sys, time
    from torchwcache.errors import SegmentError
    from torchwcache.memory import host, reading
    if sys.argv[1] == "unguarded":
        host.mmap.MADV_DONTFORK = host.mmap.MADV_NORMAL
    segment = host.HostMemory(seal_timeout_s=0.3).allocate(1 << 20)
    tensor = segment.tensor(0, 8).fill_(3)
    alive, release = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        os.read(alive, 1)
        os._exit(0)
    try:
        segment.seal()
        print("sealed", end=" ")
    except SegmentError:
        print("busy", end=" ")
    os.close(release)
    os.waitpid(pid, 0)
    segment.seal()
    print(tensor.tolist())
"""


@pytest.mark.parametrize(("guard", "expected"), [("guarded", "sealed"), ("unguarded", "busy")])
def test_a_forked_child_does_not_stand_in_the_way(guard: str, expected: str) -> None:
    with python(FORKING, guard) as child:
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, f"{expected} [3, 3, 3, 3, 3, 3, 3, 3]\n")


@pytest.mark.parametrize("end", ["seal", "close"])
def test_a_child_forked_after_the_end_of_writing_has_all_as_its_own(end: str) -> None:
    """Closed without a seal: a model that was refused, or for which memory ran out half way, is served from where it was loaded."""
    code = f"""
        import os
        from torchwcache.memory.host import HostMemory
        segment = HostMemory().allocate(1 << 20)
        tensor = segment.tensor(0, 8).fill_(3)
        segment.{end}()
        pid = os.fork()
        if pid == 0:
            tensor[0] = 9
            os._exit(0 if tensor.tolist()[:2] == [9, 3] else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), tensor.tolist()[:2], tensor.fill_(4).tolist()[:2])
    """
    with python(code) as child:
        out, _ = child.communicate(timeout=60)
    assert out == "0 [3, 3] [4, 4]\n"


# ---- mapping -----------------------------------------------------------------------------------------------------------------


def test_map_refuses_what_is_not_sealed(memory: HostMemory) -> None:
    with (
        memory.allocate(MIB) as segment,
        pytest.raises(SegmentError, match="lacks F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE"),
    ):
        memory.map(segment._fd, MIB)


@pytest.mark.parametrize("left_out", [fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_map_refuses_each_missing_seal(memory: HostMemory, left_out: int) -> None:
    fd = os.memfd_create("partly", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, MIB)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS & ~left_out)
        with pytest.raises(SegmentError, match="lacks"):
            memory.map(fd, MIB)
    finally:
        os.close(fd)


def test_map_refuses_future_write_only(memory: HostMemory) -> None:
    f_seal_future_write = 0x10
    fd = os.memfd_create("future", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, MIB)
        writable = mmap.mmap(fd, MIB, flags=mmap.MAP_SHARED)
        seals = REQUIRED_SEALS & ~fcntl.F_SEAL_WRITE | f_seal_future_write
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        writable[0] = 1  # it looks sealed, and still changes
        with pytest.raises(SegmentError, match="WRITE"):
            memory.map(fd, MIB)
    finally:
        os.close(fd)


def test_map_refuses_a_wrong_size_a_plain_file_and_a_bad_descriptor(
    sealed: host.HostWritableSegment, memory: HostMemory, tmp_path: Path
) -> None:
    with pytest.raises(SegmentError, match="entry says"):
        memory.map(sealed.seal(), MIB + 1)
    with pytest.raises(SegmentError, match="0 bytes"):
        memory.map(sealed.seal(), 0)
    (tmp_path / "plain").write_bytes(bytes(MIB))
    with open(tmp_path / "plain", "rb") as plain, pytest.raises(SegmentError):
        memory.map(plain.fileno(), MIB)
    with pytest.raises(SegmentError):
        memory.map(10_000, MIB)
    with pytest.raises(SegmentError, match="no size"):
        memory.size_of(10_000)
    assert memory.size_of(sealed.seal()) == MIB


def test_clients_write_is_its_own(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    one = memory.map(sealed.seal(), MIB).tensor(0, 4, torch.uint8)
    two = memory.map(sealed.seal(), MIB).tensor(0, 4, torch.uint8)
    one.fill_(99)
    assert two.tolist() == sealed.tensor(0, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("access", list(Access))
def test_write_in_a_client_process(sealed: host.HostWritableSegment, access: Access) -> None:
    code = """
        import sys, warnings
        warnings.simplefilter("error")
        from torchwcache.config import Access
        from torchwcache.memory.host import HostMemory
        import torch
        tensor = HostMemory().map(int(sys.argv[1]), 1 << 20, access=Access(sys.argv[2])).tensor(0, 4, torch.uint8)
        print(tensor.tolist(), flush=True)
        tensor.fill_(99)
        print(tensor.tolist(), flush=True)
    """
    fd = sealed.seal()
    with python(code, fd, access.value, pass_fds=(fd,)) as child:
        out, _ = child.communicate(timeout=60)
    if access is Access.READONLY:
        assert (child.returncode, out) == (-signal.SIGSEGV, "[0, 1, 2, 3]\n")
    else:
        assert (child.returncode, out) == (0, "[0, 1, 2, 3]\n[99, 99, 99, 99]\n")
    assert sealed.tensor(0, 4).tolist() == [0, 1, 2, 3]


def test_reading_copies_no_page(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    tensor = memory.map(sealed.seal(), MIB).tensor(0, MIB, torch.uint8)
    assert int(tensor.long().sum()) > 0
    # Not Private_Dirty: the kernel also calls a shared page private while only one process happens to map it.
    found = smaps_of(tensor.data_ptr())
    assert (found["Anonymous"], found["Rss"]) == (0, MIB // 1024)
    tensor[0] = 1  # the guard can fail: one write, one page
    assert smaps_of(tensor.data_ptr())["Anonymous"] == PAGE // 1024


def test_own_writes_are_noticed(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    mine = sealed.tensor(128, 64)
    client = memory.map(sealed.seal(), MIB)
    theirs = client.tensor(256, 64, torch.uint8)
    for segment in (sealed.mapped(), client):
        assert not segment.is_modified(0, MIB)
        assert not segment.is_modified(MIB, 0)
    mine[63] += 1
    theirs[0] += 1
    assert [sealed.mapped().is_modified(start, 64) for start in (64, 128, 192, 256)] == [False, True, False, False]
    assert [client.is_modified(start, 64) for start in (64, 128, 192, 256)] == [False, False, False, True]
    mine[63] -= 1  # what counts is the value, not that a page was copied
    assert not sealed.mapped().is_modified(0, MIB)
    assert not memory.map(sealed.seal(), MIB, access=Access.READONLY).is_modified(0, MIB)


def test_the_producers_own_mapping_keeps_its_addresses(memory: HostMemory) -> None:
    with memory.allocate(MIB) as segment:
        written = segment.tensor(64, 4).fill_(3)
        with pytest.raises(SegmentError, match="sealed"):
            segment.mapped()
        segment.seal()
        mapped = segment.mapped()
    assert mapped.tensor(64, 4, torch.uint8).data_ptr() == written.data_ptr()
    with pytest.raises(SegmentError, match="closed"):
        segment.mapped()


# ---- ownership ---------------------------------------------------------------------------------------------------------------


def test_tensors_outlive_the_segment_and_the_last_one_unmaps(memory: HostMemory) -> None:
    gc.collect()  # what a failed call before this test left in a traceback
    before = mapped_segments()
    segment = memory.allocate(MIB)
    first, second = segment.tensor(0, 4).fill_(1), segment.tensor(64, 4).fill_(2)
    address = first.data_ptr()
    fd = os.dup(segment.seal())
    segment.close()
    segment.close()
    with pytest.raises(SegmentError, match="closed"):
        segment.tensor(0, 4)
    with pytest.raises(SegmentError, match="closed"):
        segment.seal()
    mapped = memory.map(fd, MIB)
    third = mapped.tensor(0, 4, torch.uint8)
    os.close(fd)
    del mapped, first
    gc.collect()
    assert second.tolist() == [2] * 4
    assert third.tolist() == [1] * 4
    assert mapped_segments() == before + 2
    view = second[1:]
    del second, third
    assert view.tolist() == [2] * 3
    assert mapped_segments() == before + 1
    del view
    assert mapped_segments() == before
    assert not any("torchwcache" in line for line in maps_of(address))


def test_cycles_leave_no_descriptor_and_no_mapping(memory: HostMemory) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())

    def cycle() -> None:
        with memory.allocate(PAGE) as segment:
            segment.tensor(0, 8).fill_(1)
            fd = segment.seal()
            tensor = memory.map(fd, PAGE, access=Access.READONLY).tensor(0, 8, torch.uint8)
            assert int(tensor.sum()) == 8

    cycle()
    before = counts()
    for _ in range(1000):
        cycle()
    after = counts()
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) <= 20  # the allocator's own arenas may come and go


def test_a_mapping_holds_no_descriptor(sealed: host.HostWritableSegment, memory: HostMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tensors = [memory.map(sealed.seal(), MIB).tensor(0, 4, torch.uint8) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert tensors[49].tolist() == [0, 1, 2, 3]


# ---- limits ------------------------------------------------------------------------------------------------------------------


def test_too_large_is_refused_before_anything_is_made(memory: HostMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentMemoryError, match="are available") as caught:
        memory.allocate(1 << 50)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.nbytes == 1 << 50
    assert len(os.listdir("/proc/self/fd")) == before


def test_address_space_exhausted(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_nbytes", lambda: 1 << 62)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentMemoryError, match="no memory or address space left"):
        memory.allocate(1 << 55)
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptors_left(memory: HostMemory) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/dev/null", os.O_RDONLY)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # other tests' workers may hold some above the first free one
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        with pytest.raises(FileLimitError, match="ulimit -n"), _one_descriptor_spare(taken):
            memory.allocate(PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@contextlib.contextmanager
def _one_descriptor_spare(taken: list[int]) -> Iterator[None]:
    """Not even /proc can be read without a descriptor: leave the answer about memory, take the one for the segment."""
    real = host.available_nbytes

    def available() -> int:
        os.close(taken.pop())
        try:
            return real()
        finally:
            taken.append(os.dup(taken[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "available_nbytes", available)
        yield


def test_segment_nbytes(memory: HostMemory) -> None:
    assert memory.segment_nbytes(1) == 64 * MIB
    assert memory.segment_nbytes(16 << 30) == 1 << 30
    assert memory.segment_nbytes(1 << 50) == 2 << 30
    assert memory.segment_nbytes((16 << 30) + 1) == (1 << 30) + PAGE


# ---- reading files -----------------------------------------------------------------------------------------------------------


def test_read_file(memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_READ_NBYTES", 1000)
    data = os.urandom(10_000)
    (tmp_path / "file").write_bytes(data)
    with memory.allocate(PAGE * 3) as segment, open(tmp_path / "file", "rb") as file:
        target = segment.tensor(64, 9_000)
        memory.read_file(file.fileno(), 500, target)
        assert bytes(target.numpy()) == data[500:9_500]
        memory.read_file(file.fileno(), 0, target.view(torch.int16)[:0])
        with pytest.raises(EOFError, match="ends at byte 10000, 3000 bytes before"):
            memory.read_file(file.fileno(), 4_000, target)
        with pytest.raises(ValueError, match="contiguous"):
            memory.read_file(file.fileno(), 0, target[::2])


def test_release_freed(memory: HostMemory) -> None:
    memory.release_freed()
