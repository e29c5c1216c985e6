"""Names of devices, sizes, and what is said where nothing can be cached; a fake driver, and torch that believes in it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import types
import uuid
import weakref

import pytest
import torch
from support.fake_cuda import GIB, MIB, CUresult, CUuuid, FakeDevice, FakeDriver, Left

from torchwcache.errors import ConfigError, CudaError, SegmentError, SegmentMemoryError
from torchwcache.memory import cuda
from torchwcache.memory.cuda_driver import CudaDevice, load_driver
from torchwcache.memory.select import memory_for


@pytest.fixture
def bindings(monkeypatch):
    """Puts something in the place of ``cuda.bindings.driver``."""

    def put(driver):
        module = None
        if driver is not None:
            module = types.ModuleType("cuda.bindings")
            module.driver = driver
        monkeypatch.setitem(sys.modules, "cuda.bindings", module)

    return put


@pytest.fixture
def see(bindings, monkeypatch):
    """Makes torch and the package see these devices, behind a fake driver."""

    made = []

    def see(*devices):
        fake = FakeDriver(*devices)
        made.append(fake)
        bindings(fake)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.version, "hip", None)
        for name, value in {
            "is_available": True,
            "current_device": 0,
            "device_count": len(fake.devices),
            "init": None,
            "memory_reserved": 0,
            "memory_allocated": 0,
            "current_stream": types.SimpleNamespace(cuda_stream=7),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *arguments, value=value: value)
        monkeypatch.setattr(cuda, "_pool", lambda ordinal: (*map(_stream, fake.streams(ordinal)), _stream(0)))
        monkeypatch.setattr(cuda.CudaMemory, "release_freed", lambda self: None)
        return fake

    cuda.cuda_device.cache_clear()
    yield see
    cuda.cuda_device.cache_clear()
    for fake in made:
        assert_balanced(fake)


def _stream(handle):
    return types.SimpleNamespace(cuda_stream=handle)


def assert_balanced(fake):
    assert (fake.faults, fake.broken, fake.left()) == ([], [], Left())


# ---- names -------------------------------------------------------------------------------------------------------------------

ONE, OTHER = (uuid.UUID(text).bytes for text in ("00010203-0405-0607-0809-0a0b0c0d0e0f", "fffefdfc-80f9-f8f7-f6f5-f4f3f2f10080"))


def test_a_mig_instance_is_named_by_its_own_uuid_with_cuda_12_too():
    """There the first version of the call tells that of the whole GPU."""
    fake = FakeDriver(FakeDevice(uuid=ONE))
    fake.cuDeviceGetUuid_v2 = lambda device: (CUresult.CUDA_SUCCESS, CUuuid(OTHER))
    assert CudaDevice(fake, 0).uuid == str(uuid.UUID(bytes=OTHER))


def test_a_uuid_is_written_as_the_tools_write_it():
    assert CudaDevice(FakeDriver(FakeDevice(uuid=OTHER)), 0).uuid == "fffefdfc-80f9-f8f7-f6f5-f4f3f2f10080"


@pytest.mark.parametrize(("name", "expected"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_name_leads_to_its_device(see, name, expected):
    see(FakeDevice(uuid=ONE), FakeDevice(uuid=OTHER))
    memory = memory_for(name)
    assert memory.device_id == str(uuid.UUID(bytes=[ONE, OTHER][expected]))
    assert memory.device == torch.device("cuda", expected)


def test_no_number_means_the_current_device(see, monkeypatch):
    see(FakeDevice(uuid=ONE), FakeDevice(uuid=OTHER))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert memory_for("cuda").device_id == str(uuid.UUID(bytes=OTHER))


def test_a_device_has_one_id_whatever_its_number(see):
    see(FakeDevice(uuid=ONE), FakeDevice(uuid=OTHER))
    ids = [memory_for(f"cuda:{i}").device_id for i in range(2)]
    cuda.cuda_device.cache_clear()
    see(FakeDevice(uuid=OTHER), FakeDevice(uuid=ONE))
    assert [memory_for(f"cuda:{i}").device_id for i in range(2)] == ids[::-1]


@pytest.mark.parametrize("ordinal", [0, 1])
def test_memory_lies_on_the_device_that_was_named(see, ordinal):
    fake = see(FakeDevice(uuid=ONE), FakeDevice(uuid=OTHER))
    with memory_for(f"cuda:{ordinal}").allocate(2 * MIB, zeroed=False):
        assert fake.used_nbytes(ordinal) == 2 * MIB
        assert fake.used_nbytes(1 - ordinal) == 0


def test_a_segment_of_another_device_is_refused(see):
    fake = see(FakeDevice(uuid=ONE), FakeDevice(uuid=OTHER))
    with memory_for("cuda:0").allocate(2 * MIB, zeroed=False) as segment:
        with pytest.raises(SegmentError, match="lies on CUDA device 0, its entry says device 1"):
            memory_for("cuda:1").map(segment.seal(), segment.nbytes)
        assert fake.left() == Left(mappings=1, reservations=1, descriptors=1)


# ---- no GPU to cache on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_devices(see, count):
    see(*[FakeDevice() for _ in range(count)])
    with pytest.raises(ConfigError, match=rf"device='cuda:7': this process sees {count} CUDA devices, from 0 on"):
        memory_for("cuda:7")


def test_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda:7': this torch was built without CUDA"):
        memory_for("cuda:7")


def test_torch_with_cuda_without_a_gpu(see, monkeypatch):
    see()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda': torch sees no CUDA device"):
        memory_for("cuda")


def test_torch_for_rocm(see, monkeypatch):
    see()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="device='cuda': this is torch for ROCm, on whose GPUs nothing can be cached yet"):
        memory_for("cuda")


@pytest.mark.parametrize("what", ["device_id", "allocate"])
def test_cuda_bindings_missing(see, bindings, what):
    see()
    bindings(None)
    memory = memory_for("cuda")
    with pytest.raises(ConfigError, match=r'need the package cuda-bindings.*pip install "cuda-bindings==13\.\*".*12\.\*') as raised:
        _ = memory.device_id if what == "device_id" else memory.allocate(MIB)
    assert isinstance(raised.value.__cause__, ImportError)


def test_cuda_bindings_too_old(see, bindings):
    see()
    missing = ("cuDeviceGetUuid", "cuStreamIsCapturing")
    old = FakeDriver()
    names = [name for name in dir(old) if name.startswith(("cu", "CU")) and name not in missing]
    bindings(types.SimpleNamespace(**{name: getattr(old, name) for name in names}))
    with pytest.raises(ConfigError, match=rf"too old: it lacks {', '.join(missing)}: pip install .cuda-bindings==13\.\*"):
        _ = memory_for("cuda").device_id


def test_the_fake_is_new_enough(bindings):
    fake = FakeDriver()
    bindings(fake)
    assert load_driver() is fake


def test_nothing_here_imports_torch_or_cuda():
    code = "import sys, torchwcache.memory.cuda_mapping; print([name for name in ('torch', 'cuda') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- what a device can do ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lacking", "words"), [("vmm", "virtual memory management"), ("fd", "memory with a file descriptor")])
def test_a_device_that_cannot_share_memory(see, lacking, words):
    fake = see(FakeDevice(), FakeDevice(**{lacking: False}))
    memory = memory_for("cuda:1")
    for _ in range(2):  # it is not remembered as one that can
        with pytest.raises(ConfigError, match=f"CUDA device 1 does not support {words}, so that nothing can be cached on it"):
            _ = memory.device_id
    assert "cuDevicePrimaryCtxRetain" not in [call.name for call in fake.calls], "no context is made for nothing"
    assert memory_for("cuda:0").device_id


@pytest.mark.parametrize("rdma", [False, True])
def test_network_cards_can_reach_it_where_they_can_at_all(rdma):
    fake = FakeDriver(FakeDevice(rdma=rdma))
    device = CudaDevice(fake, 0)
    device.release(device.create(2 * MIB))
    (made,) = fake.named("cuMemCreate")
    properties = made.arguments[1]
    assert properties.allocFlags.gpuDirectRDMACapable == int(rdma)
    assert (properties.type, properties.requestedHandleTypes) == (1, 1)
    assert (properties.location.type, properties.location.id) == (1, 0)


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_a_number_without_a_device(ordinal):
    with pytest.raises(CudaError, match=f"cuDeviceGet failed on CUDA device {ordinal}: CUDA_ERROR_INVALID_DEVICE"):
        CudaDevice(FakeDriver(FakeDevice(), FakeDevice()), ordinal)


def test_several_calls_in_one_context():
    fake = FakeDriver(FakeDevice(), FakeDevice())
    one, other = CudaDevice(fake, 0), CudaDevice(fake, 1)
    with other.current(), one.current():
        one.release(one.create(2 * MIB))
        assert one.free_nbytes() == one.total_nbytes() == 80 * GIB
    assert len(fake.named("cuCtxPushCurrent")) == len(fake.named("cuCtxPopCurrent")) == 2
    assert_balanced(fake)


def test_a_device_is_made_once(see):
    fake = see()
    assert cuda.cuda_device(0) is cuda.cuda_device(0)
    assert len(fake.named("cuDevicePrimaryCtxRetain")) == 1


# ---- sizes -------------------------------------------------------------------------------------------------------------------

SIZES = {
    1: 64 * MIB,
    64 * MIB: 64 * MIB,
    1536 * MIB: 64 * MIB,
    1536 * MIB + 1: 64 * MIB,  # and a granule
    12 * GIB: 512 * MIB,
    72 * GIB: 3 * GIB,
    96 * GIB: 4 * GIB,
    140 * GIB: 4 * GIB,
    1500 * GIB: 4 * GIB,
}


@pytest.mark.parametrize("granularity", [2 * MIB, 32 * MIB, 48 * MIB])
@pytest.mark.parametrize("total", SIZES)
def test_the_size_of_a_segment(see, total, granularity):
    see(FakeDevice(granularity=granularity))
    memory = memory_for("cuda")
    size = memory.segment_nbytes(total)
    assert size % granularity == 0
    assert SIZES[total] <= size < SIZES[total] + 2 * granularity
    if total <= 140 * GIB:
        assert -(-total // size) <= 35, "each costs a descriptor and time"


@pytest.mark.parametrize("granularity", [2 * MIB, 32 * MIB])
@pytest.mark.parametrize("nbytes", [1, 2 * MIB, 2 * MIB + 1, 40 * MIB])
def test_a_segment_is_of_whole_granules(see, granularity, nbytes):
    fake = see(FakeDevice(granularity=granularity))
    with memory_for("cuda").allocate(nbytes, zeroed=False) as segment:
        assert segment.nbytes % granularity == 0
        assert 0 <= segment.nbytes - nbytes < granularity
        assert fake.used_nbytes(0) == segment.nbytes
        begin, end = segment.address, segment.address + segment.nbytes
        found = [segment.offset_of(address) for address in (begin - 1, begin, end - 1, end)]
        assert found == [None, 0, segment.nbytes - 1, None]


@pytest.mark.parametrize("nbytes", [0, -1])
def test_no_bytes(see, nbytes):
    see()
    with pytest.raises(ValueError, match=f"at least one byte, not {nbytes}"):
        memory_for("cuda").allocate(nbytes)


# ---- memory ------------------------------------------------------------------------------------------------------------------


def test_a_reserve_is_kept_and_what_torch_holds_unused_counts(see, monkeypatch):
    see(FakeDevice(nbytes=64 * GIB))
    memory = memory_for("cuda")
    assert memory.available_nbytes() == 64 * GIB - 64 * GIB // 256
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 2 * GIB)
    assert memory.available_nbytes() == 67 * GIB - 64 * GIB // 256


@pytest.mark.parametrize("released", [False, True])
def test_a_full_device(see, monkeypatch, released):
    fake = see(FakeDevice(nbytes=4 * GIB))
    memory = memory_for("cuda")
    (made, handle) = fake.cuMemCreate(3 * GIB, cuda.cuda_device(0)._properties, 0)
    if released:
        monkeypatch.setattr(cuda.CudaMemory, "release_freed", lambda self: fake.cuMemRelease(handle))
        with memory.allocate(2 * GIB, zeroed=False) as segment:
            assert segment.nbytes == 2 * GIB
    else:
        with pytest.raises(SegmentMemoryError, match=rf"{2 * GIB} bytes.* on cuda:0.*nothing was published.*evict") as raised:
            memory.allocate(2 * GIB)
        assert (raised.value.nbytes, raised.value.available) == (2 * GIB, GIB - 16 * MIB)
        fake.cuMemRelease(handle)
    assert made == CUresult.CUDA_SUCCESS


@pytest.mark.parametrize("code", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
def test_a_segment_that_cannot_be_made(see, code):
    fake = see()
    with fake.failing(CUresult[code], name="cuMemSetAccess"), pytest.raises(SegmentError, match=f"cuMemSetAccess.*{code}"):
        memory_for("cuda").allocate(MIB)


def access_of(fake, *segments):
    return [fake.mapped()[segment.address].access.name.rpartition("_")[2] for segment in segments]


def test_sealing_takes_the_leave_to_write(see):
    fake = see()
    memory = memory_for("cuda")
    with memory.allocate(MIB, zeroed=False) as segment:
        assert access_of(fake, segment) == ["READWRITE"]
        with pytest.raises(SegmentError, match="only a sealed segment"):
            segment.mapped()
        kernel = fake.launch(0, segment.address)
        fd = segment.seal()
        assert not fake.is_running(kernel)
        assert segment.seal() == fd
        assert len(fake.named("cuCtxSynchronize")) == 1
        assert access_of(fake, segment, segment.mapped()) == ["READ", "READ"]
        assert not os.get_inheritable(fd)
    segment.close()
    with pytest.raises(SegmentError, match="was closed"):
        segment.seal()


def test_sealing_spoils_no_capture(see):
    fake = see()
    with memory_for("cuda").allocate(MIB, zeroed=False) as segment:
        fake.begin_capture(0, 9)
        with pytest.raises(SegmentError, match=r"a CUDA graph is being captured on cuda:0: publish before or after that"):
            segment.seal()
        assert fake.end_capture(9)
        segment.seal()


def test_a_pool_that_this_torch_does_not_have(see, monkeypatch):
    fake = see()

    def refuse(ordinal):
        raise RuntimeError("Unrecognized stream")

    monkeypatch.setattr(cuda, "_pool", refuse)
    assert cuda._is_capturing(cuda.cuda_device(0)) is False
    fake.begin_capture(0, 7)
    assert cuda._is_capturing(cuda.cuda_device(0)) is True


def test_segments_are_mapped_where_they_were(see):
    fake = see()
    memory = memory_for("cuda")
    made = [memory.allocate(2 * MIB, zeroed=False) for _ in range(3)]
    places = [segment.address for segment in made]
    assert places == [places[0] + i * 2 * MIB for i in range(3)], "one call makes neighbours readable"
    assert 0x300000000000 <= places[0] < 0x500000000000
    fds = [os.dup(segment.seal()) for segment in made]
    while made:
        made.pop().close()
    del memory
    assert fake.left() == Left(descriptors=3)
    before = len(fake.named("cuMemSetAccess"))
    found = memory_for("cuda").map_all(fds, [2 * MIB] * 3, addresses=places)
    for segment in found:
        segment.settle()
    assert [segment.address for segment in found] == places
    assert access_of(fake, *found) == ["READ"] * 3
    assert len(fake.named("cuMemSetAccess")) == before + 1
    storage = found[1]._storage[MIB:]
    del found, segment
    assert len(fake.mapped()) == 1, "a slice keeps the whole"
    del storage
    for fd in fds:
        os.close(fd)


def test_what_is_made_of_a_part_of_a_segment_keeps_its_mapping(see, monkeypatch):
    fake = see()
    memory = memory_for("cuda")
    monkeypatch.setattr(cuda, "_make_view", lambda layout, storage: storage)  # no tensor without a GPU
    with memory.allocate(4 * MIB, zeroed=False) as segment:
        found = memory.map(segment.seal(), 4 * MIB)
        found.settle()
    layout = {"dtype": torch.bfloat16, "device": memory.device, "size": (512,), "stride": (1,), "storage_offset": 0}
    part, other = found.views([MIB, 0], [2 * MIB, 1024], [0, 0], [layout])
    assert (part.data_ptr(), part.nbytes(), part.device) == (found.address + MIB, 2 * MIB, memory.device)
    assert (other.data_ptr(), other.nbytes()) == (found.address, 1024)
    del found, segment, other
    gc.collect()
    assert len(fake.mapped()) == 1
    del part
    assert not fake.mapped()


def test_torch_keeps_what_a_storage_was_given_for_as_long_as_a_tensor_lives():
    """What the lifetime of every tensor on a GPU rests on."""

    class Mapping:
        pass

    memory, mapping = torch.arange(16, dtype=torch.uint8), Mapping()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr() + 4, memory.device, 8)
    storage._torchwcache_mapping = mapping
    lives = weakref.ref(mapping)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    del mapping, storage
    view = torch.nn.Parameter(tensor[2:], requires_grad=False)
    del tensor
    gc.collect()
    assert lives() is not None
    assert view.tolist() == [6, 7, 8, 9, 10, 11]
    del view
    assert lives() is None


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_segment_that_cannot_be_mapped_takes_all_with_it(see, bad):
    fake = see()
    memory = memory_for("cuda")
    made = [memory.allocate(2 * MIB, zeroed=False) for _ in range(3)]
    sizes = [2 * MIB + (i == bad) * 2 * MIB for i in range(3)]
    before = fake.left()
    with pytest.raises(SegmentError, match=f"cannot be mapped as one of {4 * MIB} bytes"):
        memory.map_all([segment.seal() for segment in made], sizes)
    assert fake.left() == before
    for segment in made:
        segment.close()


def test_a_segment_that_cannot_be_made_readable(see):
    fake = see()
    memory = memory_for("cuda")
    segment = memory.allocate(2 * MIB, zeroed=False)
    code = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    fake.before["cuMemSetAccess"] = lambda *arguments: fake.dead.update({0: code})
    found = memory.map(segment._fd, 2 * MIB)
    for _ in range(2):
        with pytest.raises(SegmentError, match=r"could not be made readable: cuMemSetAccess.*CUDA_ERROR_ILLEGAL_ADDRESS"):
            found.settle()
    fake.before.clear()
    fake.dead.clear()
    del found
    gc.collect()
    segment.close()


def test_a_segment_without_a_storage_closes_its_descriptor_once(see, monkeypatch):
    """The number may be somebody else's by the second time."""
    see()
    memory = memory_for("cuda")
    closed = []

    def close(fd, really=os.close):
        closed.append(fd)
        with contextlib.suppress(OSError):
            really(fd)

    def refuse(mapping, device):
        raise RuntimeError("no storage")

    monkeypatch.setattr(cuda, "_whole", refuse)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(RuntimeError, match="no storage"):
        memory.allocate(2 * MIB)
    gc.collect()
    assert len(closed) == 1
