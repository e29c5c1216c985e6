"""The parts of the vLLM adapter that can be tested without vLLM; ``tests/vllm`` runs the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.errors import FingerprintError, RebindError, RefusedError
from torchwcache.identity.fingerprint import Fingerprint
from torchwcache_vllm import adapter, guards, identity, memory, versions
from torchwcache_vllm.registries import Registries


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass
class Part:
    backend: Any = None
    size: int = 3


@dataclasses.dataclass
class Model:
    model: str = "/somewhere"
    dtype: Any = torch.float32
    max_model_len: int = 128
    hf_config: Any = dataclasses.field(default_factory=lambda: HFConfig({"hidden_size": 8, "_name_or_path": "/somewhere"}))
    an_option_of_next_year: bool = False


class HFConfig:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


@dataclasses.dataclass
class Config:
    model_config: Model = dataclasses.field(default_factory=Model)
    scheduler_config: Any = dataclasses.field(default_factory=object)
    attention_config: Part = dataclasses.field(default_factory=Part)
    parallel_config: Any = None
    a_config_of_next_year: Any = None


def fields(**changed: Any) -> Fingerprint:
    config = Config()
    for path, value in changed.items():
        target: Any = config
        *parents, name = path.split("__")
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return Fingerprint.from_fields(identity.config_fields(config, config.model_config))


@pytest.mark.parametrize(
    "changed",
    [
        {"model_config__model": "/elsewhere"},
        {"model_config__max_model_len": 64},
        {"scheduler_config": 7},
        {"model_config__hf_config": HFConfig({"hidden_size": 8, "_name_or_path": "/elsewhere", "transformers_version": "9"})},
    ],
)
def test_what_does_not_count(changed: dict[str, Any]) -> None:
    assert fields(**changed) == fields()


@pytest.mark.parametrize(
    "changed",
    [
        {"model_config__dtype": torch.bfloat16},
        {"attention_config__backend": Kind.ONE},
        {"attention_config__size": 4},
        {"model_config__hf_config": HFConfig({"hidden_size": 9})},
        {"model_config__an_option_of_next_year": True},
        {"a_config_of_next_year": Part()},
        {"a_config_of_next_year": {"x": {1, 2}}},
    ],
)
def test_everything_else_counts(changed: dict[str, Any]) -> None:
    assert fields(**changed) != fields()


def test_the_length_counts_where_it_picks_the_rotary_factors() -> None:
    rope = HFConfig({"rope_parameters": {"rope_type": "longrope"}})
    assert fields(model_config__hf_config=rope) != fields(model_config__hf_config=rope, model_config__max_model_len=64)


def test_what_cannot_be_named_is_refused() -> None:
    with pytest.raises(FingerprintError, match=r"a_config_of_next_year\['x'\] is a object"):
        fields(a_config_of_next_year={"x": object()})


def test_a_build_aside_leaves_no_trace_and_can_take_the_place_of_another() -> None:
    layers: dict[str, object] = {"other": 0}
    names, rotary, counts = ["other"], {"shared": 1}, Counter({"op": 1})
    live = Registries({"layers": layers, "names": names, "rotary": rotary, "counts": counts}, own=("rotary",))

    def build(which: str) -> None:
        assert "layer" not in layers, "Duplicate layer name"
        layers["layer"] = which
        names.append("layer")
        rotary.setdefault("shared", which)  # type: ignore[arg-type]
        counts["op"] += 2

    with live.aside() as aside:
        assert rotary == {}
        build("aside")
        assert rotary == {"shared": "aside"}
    assert (layers, names, rotary, counts) == ({"other": 0}, ["other"], {"shared": 1}, Counter({"op": 1}))
    with live.recording() as loaded:
        build("loaded")
    assert (layers["layer"], rotary) == ("loaded", {"shared": 1})
    layers["later"] = 3  # somebody else's
    live.remove(loaded)
    assert (layers, names, counts) == ({"other": 0, "later": 3}, ["other"], Counter({"op": 1}))
    live.add(aside)
    assert (layers, names) == ({"other": 0, "later": 3, "layer": "aside"}, ["other", "layer"])
    assert (rotary, counts) == ({"shared": "aside"}, Counter({"op": 3}))

    def fail() -> None:
        with live.aside():
            layers["half"] = 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "half" not in layers


def test_variables() -> None:
    environ = {"VLLM_PORT": "1", "VLLM_USE_DEEP_GEMM": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "HOME": "/", "VLLM_OF_NEXT_YEAR": "x"}
    assert identity.variables(environ) == {"VLLM_USE_DEEP_GEMM": "1", "VLLM_OF_NEXT_YEAR": "x"}


def config(**parts: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {
        "parallel_config": SimpleNamespace(enable_eplb=False, data_parallel_size=1),
        "cache_config": SimpleNamespace(),
        "device_config": SimpleNamespace(device="cpu"),
        "offload_config": None,
    }
    return SimpleNamespace(**{**plain, **parts})


@pytest.mark.parametrize(
    ("vllm_config", "device", "says"),
    [
        (config(), None, ""),
        (config(), "cpu", ""),
        (config(), "cuda", "another device"),
        (config(parallel_config=SimpleNamespace(enable_eplb=True)), None, "--enable-eplb"),
        (config(parallel_config=SimpleNamespace(enable_elastic_ep=True)), None, "--enable-elastic-ep"),
        (config(weight_transfer_config={}), None, "--weight-transfer-config"),
        (config(cache_config=SimpleNamespace(cpu_offload_gb=1.0)), None, "--cpu-offload-gb"),
        (config(offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=1.0))), None, "--cpu-offload-gb"),
        (config(offload_config=SimpleNamespace(prefetch=SimpleNamespace(offload_group_size=8))), None, "--cpu-offload-gb"),
        (
            config(parallel_config=SimpleNamespace(prefill_context_parallel_size=2, data_parallel_size=2)),
            None,
            "prefill context parallelism",
        ),
    ],
)
def test_configurations_that_are_refused(vllm_config: Any, device: str | None, says: str) -> None:
    refusal = guards.refusal_of(vllm_config, SimpleNamespace(device=device))
    assert says in refusal
    assert bool(refusal) is bool(says)


class Worker:
    """As vLLM's worker, as far as guards see it."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def reload_weights(self, path: str = "") -> None:
        self.did.append(f"reload {path}")

    def sleep(self, level: int = 1) -> None:
        self.did.append(f"sleep {level}")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.did.append(f"discard {tags}")

    def execute_model(self) -> None:
        self.did.append("execute")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = type("Worker", (Worker,), dict(Worker.__dict__))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Worker()  # type: ignore[no-any-return]


def attachment(source: str, published: bool) -> Any:
    return SimpleNamespace(report=SimpleNamespace(source=source, published=published), model=nn.Linear(1, 1))


@pytest.mark.parametrize(("source", "published"), [("cache", False), ("waited", False), ("disk", True)])
def test_writes_are_refused_while_the_model_lives(worker: Worker, source: str, published: bool) -> None:
    shared = attachment(source, published)
    guards.guard(shared)
    guards.guard(shared)  # a draft model's
    for call in (
        worker.reload_weights,
        lambda: worker.sleep(2),
        lambda: worker.sleep(level=2),
        lambda: worker.discard(("weights",)),
    ):
        with pytest.raises(RefusedError, match="shared with other processes"):
            call()
    worker.sleep()
    worker.discard(("kv_cache",))
    worker.execute_model()
    assert worker.did == ["sleep 1", "discard ('kv_cache',)", "execute"]
    del shared.model
    import gc

    gc.collect()
    worker.reload_weights("x")
    assert worker.did[-1] == "reload x"


def test_a_model_of_this_process_alone_is_not_guarded(worker: Worker) -> None:
    alone = attachment("disk", False)
    guards.guard(alone)
    worker.reload_weights("x")
    assert worker.did == ["reload x"]
    assert alone.model not in guards.shared_models()


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.26.0", ""),
        ("0.32.0+cpu", ""),
        ("0.33.1rc2.dev7", ""),
        ("0.25.9", "older"),
        ("0.34.0", "newer"),
        ("1.0.0", "newer"),
        ("dev", "older"),
    ],
)
def test_versions(version: str, says: str) -> None:
    note = versions.version_note(version)
    assert says in note
    assert bool(note) is bool(says)


GIB = 1 << 30


def snapshot(free: float, total: float = 80) -> SimpleNamespace:
    return SimpleNamespace(free_memory=int(free * GIB), total_memory=int(total * GIB))


def test_the_start_check_asks_for_what_is_needed_beside_the_mapped_weights() -> None:
    cache = SimpleNamespace(gpu_memory_utilization=0.9)
    assert memory.requested_beside(60 * GIB, snapshot(free=19), cache) == 72 * GIB - 60 * GIB
    with pytest.raises(ValueError, match="lower --gpu-memory-utilization"):
        memory.requested_beside(60 * GIB, snapshot(free=11), cache)
    with pytest.raises(ValueError, match="beside the weights that torchwcache maps"):
        memory.requested_beside(73 * GIB, snapshot(free=79), cache)


def test_mapped_weights_that_vllm_does_not_know_of_are_taken_off_the_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        cache_config = SimpleNamespace(kv_cache_memory_bytes=None)

        def determine_available_memory(self) -> int:
            return 1000

    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(memory, "_later", [])
    memory.charge_later(300)
    memory.charge_later(200)
    assert Worker().determine_available_memory() == 500
    memory.charge_later(9000)
    assert Worker().determine_available_memory() == 0
    Worker.cache_config.kv_cache_memory_bytes = 7  # type: ignore[assignment]
    assert Worker().determine_available_memory() == 1000


def served(source: str, *, published: bool, taken: int | None, mapped: int = 800, copied: int = 10, segments: int = 900) -> Any:
    """An attachment to a model whose load took so many bytes."""
    module = nn.Module()
    if taken is not None:
        module.__dict__["_torchwcache_load_nbytes"] = {"allocated": taken, "reserved": taken + 50}
    report = SimpleNamespace(source=source, published=published, mapped_nbytes=mapped, copied_nbytes=copied)
    return SimpleNamespace(report=report, model=module, memory_nbytes=segments if published or source != "disk" else 0)


@pytest.mark.parametrize("asks", [False, True], ids=["before 0.32", "0.32"])
def test_a_start_is_charged_what_the_load_took(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.model_executor.model_loader.base_loader")
    loader = type("BaseModelLoader", (), {"get_external_weight_memory": None} if asks else {})
    module.BaseModelLoader = loader  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    taken = 1050 if asks else 1000  # since 0.32 by what is free on the device: all that the allocator has
    for source in ("cache", "waited"):
        hit = served(source, published=False, taken=1000)
        assert memory.external_nbytes(hit) == memory.not_counted_nbytes(hit) == taken - 10
    # Of a first start vLLM has counted the segments already, and the copies.
    assert memory.not_counted_nbytes(served("disk", published=True, taken=1000)) == taken - 900 - 10
    assert memory.not_counted_nbytes(served("disk", published=True, taken=1000, segments=1200)) == taken - 1200 - 10
    assert memory.not_counted_nbytes(served("disk", published=False, taken=1000)) == 0
    unmeasured = served("cache", published=False, taken=None)
    assert memory.external_nbytes(unmeasured) == memory.not_counted_nbytes(unmeasured) == 800
    assert memory.not_counted_nbytes(served("disk", published=True, taken=None)) == 0


class Kernel:
    pass


class OtherKernel:
    pass


class Method:
    """A quantization method that makes a kernel of finished weights."""

    moe_kernel: Any = None
    supports_pre_processed_weights = True
    kernel: Any = Kernel

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        assert processed == [True]
        self.moe_kernel = self.kernel()


class Layer(nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2), requires_grad=False)
        self.quant_method = method


processed: list[bool] = []


@pytest.fixture
def pre_processed_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def weights_already_processed() -> Iterator[None]:
        processed.append(True)
        yield
        processed.clear()

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.model_executor.utils"].weights_already_processed = weights_already_processed  # type: ignore[attr-defined]
    processed.clear()


def two_layers() -> tuple[nn.Sequential, list[Method]]:
    methods = [Method(), Method()]
    return nn.Sequential(*(Layer(method) for method in methods)), methods


def stamped() -> dict[str, dict[str, str]]:
    module, methods = two_layers()
    for method in methods:
        method.moe_kernel = Kernel()
    return adapter._kernels(module)


def test_kernels_are_left_out_only_when_every_one_can_be_made_anew(pre_processed_mode: None) -> None:
    module, methods = two_layers()
    assert adapter._kernels(module) == {}
    methods[1].moe_kernel = Kernel()
    name = f"{__name__}:Kernel"
    assert adapter._kernels(module) == {"1": {"moe_kernel": name}}
    methods[0].moe_kernel = Kernel()
    methods[0].supports_pre_processed_weights = False
    assert adapter._kernels(module) == {}


def test_an_older_vllm_cannot_make_them_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module, methods = two_layers()
    methods[0].moe_kernel = Kernel()
    assert adapter._kernels(module) == {}


def test_kernels_are_made_anew_and_must_be_the_same(pre_processed_mode: None) -> None:
    module, methods = two_layers()
    module.__dict__[adapter._STAMP] = stamped()
    adapter._make_kernels(module)
    assert all(type(method.moe_kernel) is Kernel for method in methods)

    module, methods = two_layers()
    module.__dict__[adapter._STAMP] = stamped()
    methods[1].kernel = OtherKernel
    with pytest.raises(RebindError, match=r"1: vLLM makes .*OtherKernel"):
        adapter._make_kernels(module)


def test_a_tensor_that_is_replaced_on_the_way_is_an_error(pre_processed_mode: None) -> None:
    class Replacing(Method):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            super().process_weights_after_loading(layer)
            layer.weight = nn.Parameter(torch.ones(2), requires_grad=False)

    module = nn.Sequential(Layer(Method()), Layer(Replacing()))
    module.__dict__[adapter._STAMP] = stamped()
    with pytest.raises(RebindError, match=r"1.weight: vLLM replaced this tensor"):
        adapter._make_kernels(module)


def test_the_engines_configuration_is_found_wherever_it_is_held() -> None:
    live = type("VllmConfig", (), {"__module__": "vllm.config.vllm"})()
    module = nn.Sequential(nn.Linear(1, 1))
    module.vllm_config = live  # type: ignore[assignment]
    module[0].backend = SimpleNamespace(parts=[1, {"cache": live}])  # type: ignore[assignment]
    assert sorted(adapter._config_paths(module)) == ["0.backend.parts[1]['cache']", "vllm_config"]


def test_what_the_build_allocates_counts() -> None:
    assert adapter._shapes(nn.Linear(2, 2)) == adapter._shapes(nn.Linear(2, 2, device="meta"))
    assert adapter._shapes(nn.Linear(2, 2)) != adapter._shapes(nn.Linear(2, 3))
    assert adapter._shapes(nn.Linear(2, 2)) != adapter._shapes(nn.Linear(2, 2, dtype=torch.float16))
