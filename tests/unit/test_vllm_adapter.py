"""The parts of the vLLM adapter that can be tested without vLLM; ``tests/vllm`` runs the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from torchwcache import engine_memory
from torchwcache.adapter import LoadResult
from torchwcache.config import ModelConfig, Role
from torchwcache.errors import FingerprintError, NotAFunctionOfCheckpointError, RebindError, RefusedError
from torchwcache.identity.fingerprint import Fingerprint
from torchwcache.memory.select import memory_for
from torchwcache.production import check_publishable, load_unpublished
from torchwcache_vllm import adapter, engine_core, guards, identity, memory, plugin, ranks, versions
from torchwcache_vllm.registries import Registries
from torchwcache_vllm.unwritten import _unpadded, not_given_by_target


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
    assert identity.variables({"VLLM_ENABLE_STARTUP_PLAN": "1"}) == {}
    # vLLM 0.26 picks the kernel of FP8 by it, and so the layout of the weights.
    assert identity.variables({"VLLM_TEST_FORCE_FP8_MARLIN": "1", "VLLM_TEST_FORCE_LOAD_FORMAT": "auto"}) == {
        "VLLM_TEST_FORCE_FP8_MARLIN": "1"
    }


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
            "prefill context parallelism together",
        ),
        *(
            (
                config(
                    parallel_config=SimpleNamespace(
                        prefill_context_parallel_size=2, data_parallel_size=1, enable_expert_parallel=bool(not says)
                    )
                ),
                None,
                says,
            )
            for says in ("", "prefill context parallelism without")
        ),
    ],
)
def test_configurations_that_are_refused(vllm_config: Any, device: str | None, says: str) -> None:
    refusal = guards.refusal_of(vllm_config, SimpleNamespace(device=device))
    assert says in refusal
    assert bool(refusal) is bool(says)


def test_devices_whose_memory_cannot_be_shared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM then loads by itself, as after every refusal; asking for memory there is an error."""
    load = SimpleNamespace(device=None)
    gpu = config(device_config=SimpleNamespace(device=torch.device("cuda")))
    assert guards.refusal_of(gpu, load) == guards.unknown_device(gpu) == ""
    assert "not on xpu" in guards.refusal_of(config(device_config=SimpleNamespace(device=torch.device("xpu", 0))), load)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "not on an AMD GPU" in guards.refusal_of(gpu, load)
    assert guards.refusal_of(config(), load) == ""


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

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.did.append("init")

    def start_weight_update(self) -> None:
        self.did.append("start")

    def start_draft_weight_update(self) -> None:
        self.did.append("start draft")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.did.append("update")

    def reset_weights(self) -> None:
        self.did.append("reset")

    def elastic_ep_execute(self, execute_method: str, *args: Any) -> None:
        self.did.append(execute_method)

    def execute_model(self) -> None:
        self.did.append("execute")


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = type("Worker", (Worker,), dict(Worker.__dict__))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Worker()  # type: ignore[no-any-return]


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("reload_weights", (), {"path": "x"}),
    ("init_weight_transfer_engine", ({},), {}),
    ("start_weight_update", (), {}),
    ("start_draft_weight_update", (), {}),
    ("update_weights", ({},), {}),
    ("reset_weights", (), {}),
    ("elastic_ep_execute", ("receive_weights",), {}),
    ("sleep", (2,), {}),
    ("sleep", (), {"level": 2}),
    ("discard", (("weights",),), {}),
    ("discard", (), {"tags": ("kv_cache", "weights")}),
]


@pytest.fixture
def shared_model() -> Iterator[nn.Module]:
    model = nn.Linear(1, 1)
    yield model
    guards._shared.discard(model)


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_writes_are_refused_while_the_model_lives(
    worker: Worker, shared_model: nn.Module, name: str, args: Any, kwargs: Any
) -> None:
    guards.guard(shared_model, shared=True)
    guards.guard(shared_model, shared=True)  # a draft model's
    assert shared_model in guards.shared_models()
    with pytest.raises(RefusedError, match="shared with other processes"):
        getattr(worker, name)(*args, **kwargs)
    assert worker.did == []
    worker.sleep()
    worker.discard(("kv_cache",))
    worker.execute_model()
    assert worker.did == ["sleep 1", "discard ('kv_cache',)", "execute"]
    guards._shared.discard(shared_model)  # as when it dies
    getattr(worker, name)(*args, **kwargs)
    assert len(worker.did) == 4


def test_a_dead_model_is_guarded_no_longer(worker: Worker) -> None:
    model = nn.Linear(1, 1)
    guards.guard(model, shared=True)
    del model
    gc.collect()
    worker.reload_weights("x")
    assert worker.did == ["reload x"]


def test_a_model_that_no_rank_shares_is_not_guarded(worker: Worker, shared_model: nn.Module) -> None:
    guards.guard(shared_model, shared=False)
    worker.reload_weights("x")
    assert worker.did == ["reload x"]
    assert shared_model not in guards.shared_models()


# ---- the engine core ---------------------------------------------------------------------------------------------------------


class Executor:
    """As vLLM's, which marks what it discards as asleep even where its workers fail."""

    def __init__(self, load_format: str, worker: Worker, other: Worker) -> None:
        self.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        self.workers, self.asked, self.asleep = (worker, other), [], set()  # type: ignore[var-annotated]

    def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        self.asked.append(method)
        if callable(method):
            return [False, method(self.workers[1])]  # as if only the last rank had anything to do with us
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]

    def discard(self, tags: tuple[str, ...]) -> None:
        try:
            self.collective_rpc("discard", args=(tags,))
        finally:
            self.asleep |= set(tags)


class EngineCore:
    """As vLLM's, which pauses before it sends its workers to sleep."""

    def __init__(self, executor: Any) -> None:
        self.model_executor, self.paused = executor, False

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.paused = True
        self.model_executor.collective_rpc("sleep", kwargs={"level": level})

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)  # type: ignore[no-any-return]


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a guarded engine core whose executor was given a load format."""
    classes = {}
    for module_name, cls in (("vllm.v1.engine.core", EngineCore), ("vllm.v1.executor.abstract", Executor)):
        module = ModuleType(module_name)
        classes[cls] = type(cls.__name__, (cls,), dict(cls.__dict__))
        setattr(module, cls.__name__, classes[cls])
        monkeypatch.setitem(sys.modules, module_name, module)
    engine_core.guard_engine_core()
    engine_core.guard_engine_core()  # vLLM may call its plugins again
    return lambda load_format="torchwcache": classes[EngineCore](classes[Executor](load_format, Worker(), Worker()))


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_the_core_refuses_before_any_worker_is_told_to_write(
    core: Any, shared_model: nn.Module, name: str, args: Any, kwargs: Any
) -> None:
    guards.guard(shared_model, shared=True)
    engine = core()
    executor = engine.model_executor
    with pytest.raises(RefusedError, match="shared with other processes"):
        engine.collective_rpc(name, None, args, kwargs)
    if name in ("sleep", "discard"):
        with pytest.raises(RefusedError, match="shared with other processes"):
            getattr(engine if name == "sleep" else executor, name)(*args, **kwargs)
    assert not engine.paused
    assert not executor.asleep
    assert set(executor.asked) == {guards.shares_weights}


def test_the_core_lets_through_what_writes_nothing(core: Any, shared_model: nn.Module) -> None:
    guards.guard(shared_model, shared=True)
    engine = core()
    engine.sleep()
    engine.sleep(0, mode="keep")
    engine.model_executor.discard(("kv_cache",))
    engine.collective_rpc("execute_model")
    engine.collective_rpc(lambda worker: worker.execute_model())
    assert guards.shares_weights not in engine.model_executor.asked
    assert engine.model_executor.workers[1].did == ["sleep 1", "sleep 0", "discard ('kv_cache',)", "execute", "execute"]


def test_the_core_lets_everything_through_where_nothing_is_shared(core: Any) -> None:
    engine = core()
    engine.sleep(2)
    engine.collective_rpc("reload_weights", args=("x",))
    assert engine.model_executor.workers[0].did == ["sleep 2", "reload x"]


def test_workers_of_an_engine_that_does_not_load_through_the_cache_are_asked_nothing(core: Any, shared_model: nn.Module) -> None:
    """They need not have the package, to which the question belongs."""
    guards.guard(shared_model, shared=True)  # another engine's of this process
    engine = core("auto")
    engine.sleep(2)
    assert engine.model_executor.asked == ["sleep"]
    engine.model_executor.vllm_config.speculative_config = SimpleNamespace(
        draft_load_config=SimpleNamespace(load_format="torchwcache")
    )
    with pytest.raises(RefusedError):
        engine.sleep(2)


def test_a_vllm_without_such_a_core_still_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", ModuleType("vllm.v1.engine.core"))
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.abstract", None)  # type: ignore[arg-type]
    engine_core.guard_engine_core()


# ---- ranks -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for vLLM's groups, in a process that is the last rank of each."""

    def set_up(**sizes: int) -> None:
        module: Any = ModuleType("vllm.distributed.parallel_state")
        for axis in ("tp", "pp", "dp", "ep"):
            size = sizes.get(axis, 1)
            cpu_group = SimpleNamespace(rank=lambda size=size: size - 1, size=lambda size=size: size)
            group = SimpleNamespace(world_size=size, rank_in_group=size - 1, cpu_group=cpu_group)
            setattr(module, f"get_{axis}_group", lambda group=group: group)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return set_up


@pytest.mark.parametrize(
    ("tp", "pp", "draft", "size"),
    [(1, 1, False, 1), (2, 1, False, 2), (1, 2, False, 2), (2, 2, False, 4), (1, 2, True, 1), (2, 2, True, 2)],
)
def test_a_draft_is_agreed_on_by_its_pipeline_stage_alone(layout: Any, tp: int, pp: int, draft: bool, size: int) -> None:
    layout(tp=tp, pp=pp)
    assert ranks.ranks_of(1.0, draft=draft).size == size


@pytest.mark.parametrize(("sizes", "matters"), [({"tp": 2}, False), ({"tp": 2, "ep": 2}, True), ({"dp": 2}, True)])
def test_experts_are_cut_over_data_parallel_ranks_too(layout: Any, sizes: dict[str, int], matters: bool) -> None:
    layout(**sizes)
    parallel = SimpleNamespace(enable_expert_parallel="ep" in sizes)
    assert ranks.parallelism(SimpleNamespace(parallel_config=parallel)).dp_matters is matters


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_replicas_tell_each_other_what_is_shared(layout: Any, monkeypatch: pytest.MonkeyPatch, here: bool, there: bool) -> None:
    def exchange(self: Any, word: str, what: str) -> tuple[str, ...]:
        assert self.size == 2
        return ("shared" if there else "private", word)

    monkeypatch.setattr(ranks.ProcessGroupRanks, "exchange", exchange)
    layout(tp=2)
    assert ranks.shared_anywhere(here, 1.0) is here
    layout(dp=2)
    assert ranks.shared_anywhere(here, 1.0) is (here or there)


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


def test_vllms_first_look_is_corrected_for_what_was_evicted_since(start_check: Any) -> None:
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="torchwcache"))
    sys.modules["vllm.config"].get_current_vllm_config_or_none = lambda: config  # type: ignore[attr-defined]

    class Loader:
        evicted_nbytes = 0

        def __init__(self, load_config: Any) -> None:
            pass

        def get_external_weight_memory(self, vllm_config: Any) -> int:
            self.evicted_nbytes = 50 * GIB
            return 0

    sys.modules["torchwcache_vllm.loader"].TorchwcacheModelLoader = Loader  # type: ignore[attr-defined]
    memory.correct_start_check()
    look = SimpleNamespace(free_memory=20 * GIB, total_memory=80 * GIB, cuda_memory=60 * GIB, non_torch_memory=59 * GIB)
    assert start_check.request_memory(look, SimpleNamespace(gpu_memory_utilization=0.8)) == 7
    assert (look.free_memory, look.cuda_memory, look.non_torch_memory) == (70 * GIB, 10 * GIB, 9 * GIB)


@pytest.fixture
def start_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's modules of the check for free memory, as before 0.32."""
    modules = {
        "vllm.config": {
            "get_current_vllm_config_or_none": lambda: SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
        },
        "vllm.v1.worker.utils": {"request_memory": lambda init_snapshot, cache_config: 7},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": type("BaseModelLoader", (), {})},
        "torchwcache_vllm.loader": {"LOAD_FORMAT": "torchwcache", "TorchwcacheModelLoader": None},
    }
    for name, attributes in modules.items():
        for parent in {name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)} - {"torchwcache_vllm"}:
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    utils = sys.modules["vllm.v1.worker.utils"]
    monkeypatch.setattr(sys.modules["vllm.v1.worker"], "utils", utils, raising=False)
    return utils


def test_the_start_check_of_other_load_formats_is_vllms_own(start_check: Any) -> None:
    memory.correct_start_check()
    memory.correct_start_check()
    assert start_check.request_memory(init_snapshot=None, cache_config=None) == 7  # and no loader was made


def test_a_start_check_that_is_called_otherwise_is_left_alone(start_check: Any) -> None:
    start_check.request_memory = changed = lambda snapshot: 7
    with pytest.raises(TypeError, match=r"takes \['snapshot'\]"):
        memory.correct_start_check()
    assert start_check.request_memory is changed


LOST = ("`--load-format torchwcache` is not known", "vLLM's own check for free memory", "another load format")


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({}, LOST[:2]),
        ({"TORCHWCACHE_FALLBACK": "error"}, LOST[:2]),
        ({"TORCHWCACHE_MODE": "off", "TORCHWCACHE_FALLBACK": "error"}, LOST[:2]),
        ({"TORCHWCACHE_MODE": "daemon"}, LOST),
    ],
)
def test_a_vllm_that_nobody_knows_starts_all_the_same(
    environment: dict[str, str], parts: tuple[str, ...], no_vllm: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin.register()
    assert len(no_vllm.messages) == len(parts)
    for message, part in zip(no_vllm.messages, parts, strict=True):
        assert part in message
        assert "ImportError: of next year" in message


def test_it_does_not_start_when_the_cache_must_be_had(no_vllm: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHWCACHE_MODE", "client")
    monkeypatch.setenv("TORCHWCACHE_FALLBACK", "error")
    with pytest.raises(RefusedError, match=r"of next year.*is not known"):
        plugin.register()


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A vLLM where nothing is where it was."""

    class Absent(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError("of next year")

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.base_loader"):
        monkeypatch.setitem(sys.modules, name, Absent(name))
    for name in ("TORCHWCACHE_MODE", "TORCHWCACHE_FALLBACK"):
        monkeypatch.delenv(name, raising=False)
    plugin._register_loader.cache_clear()
    return caplog


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "torchwcache"
    model_loader_extra_config: Any = None
    device: Any = None


class Loads:
    """Stands for vLLM's base class and its default loader."""

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class Started:
    """Stands for ``RankStart``: a miss on a GPU."""

    def __init__(self) -> None:
        self.cfg = SimpleNamespace(device="cuda:0")
        self.adapter = SimpleNamespace(put_off=False)
        self.closed = self.decided = 0

    def decide(self) -> bool:
        self.decided += 1
        return False

    def needed_nbytes(self) -> int:
        return 0

    def free_up(self, nbytes: int, free: Any) -> int:
        return 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def our_loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``torchwcache_vllm.loader``, whatever vLLM there is."""
    modules = {
        "vllm.config.load": {"LoadConfig": LoadConfig},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": Loads},
        "vllm.model_executor.model_loader.default_loader": {"DefaultModelLoader": Loads},
    }
    for name, attributes in modules.items():
        for parent in (name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "torchwcache_vllm.loader", raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 80 * GIB))
    yield importlib.import_module("torchwcache_vllm.loader")
    sys.modules.pop("torchwcache_vllm.loader", None)


def test_an_engine_that_never_came_to_load_is_given_up(our_loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own check for memory may end a start of this process, which then starts another: it would wait for the first."""
    monkeypatch.setattr(our_loader, "OwnMemory", lambda device: None)
    starts: list[Started] = []

    def begin(loader: Any, vllm_config: Any, model_config: Any, prefix: str) -> Started:
        if (id(model_config), prefix) not in our_loader._starts:
            starts.append(Started())
            our_loader._starts[id(model_config), prefix] = starts[-1]
        return our_loader._starts[id(model_config), prefix]  # type: ignore[no-any-return]

    monkeypatch.setattr(our_loader.TorchwcacheModelLoader, "_start", begin)
    cache = SimpleNamespace(gpu_memory_utilization=0.5)
    for model in (object(), other := object(), other):
        config = SimpleNamespace(model_config=model, cache_config=cache)
        assert our_loader.TorchwcacheModelLoader(LoadConfig()).get_external_weight_memory(config) == 0
    assert [start.decided for start in starts] == [1, 1, 1]
    assert [start.closed for start in starts] == [1, 1, 0]
    assert list(our_loader._starts.values()) == starts[2:]


class DeviceConfig:
    """A part that an engine's config and those of its drafts have in common."""


def engine_config() -> SimpleNamespace:
    return SimpleNamespace(device_config=DeviceConfig())


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of vLLM's, as far as it looks how much memory is left."""

    class Worker:
        cache_config = SimpleNamespace(kv_cache_memory_bytes=None)

        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config
            self.requested_memory = 1100

        def determine_available_memory(self) -> int:
            return self.cache_config.kv_cache_memory_bytes or self.requested_memory - 100

        def startup_plan(self) -> int:
            """As ``compile_or_warm_up_model`` computes what later starts take for their KV cache without looking."""
            return int(self.requested_memory) - 100

    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Worker


def test_mapped_weights_that_vllm_does_not_know_of_are_taken_off_the_kv_cache(looking: Any) -> None:
    engine = engine_config()
    memory.charge_later(300, engine)
    memory.charge_later(200, SimpleNamespace(device_config=engine.device_config))  # a draft's config is a copy
    worker = looking(engine)
    assert [worker.determine_available_memory() for _ in range(2)] == [500, 500]
    memory.charge_later(9000, engine)
    assert looking(engine).determine_available_memory() == 0
    looking.cache_config.kv_cache_memory_bytes = 7  # the user, or a startup plan, says how much
    memory.charge_later(300, engine)
    assert looking(engine).determine_available_memory() == 7


def test_a_startup_plan_holds_what_vllm_does_not_count(looking: Any) -> None:
    """Whoever takes it next may load from disk, and will not look again."""
    engine = engine_config()
    memory.charge_later(300, engine)
    worker = looking(engine)
    assert worker.determine_available_memory() == worker.startup_plan() == 700


def test_what_is_evicted_for_a_draft_was_not_free_when_vllm_looked_first(looking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends a start when there is more free after the load than before it."""
    engine = engine_config()
    look = SimpleNamespace(free_memory=70, cuda_memory=30)
    monkeypatch.setattr(looking, "init_snapshot", look, raising=False)
    memory.charge_later(1, engine)
    memory.charge_later(2, engine, evicted=40)
    worker = looking(engine)
    for _ in range(2):
        assert worker.determine_available_memory() == 997
        assert (look.free_memory, look.cuda_memory) == (110, -10)


def test_each_engine_of_a_process_is_charged_for_its_own_weights(looking: Any) -> None:
    first, second = engine_config(), engine_config()
    memory.charge_later(100, first)
    memory.charge_later(300, second)
    assert looking(first).determine_available_memory() == 900
    worker = looking(second)
    assert worker.determine_available_memory() == 700
    assert worker.determine_available_memory() == 700
    memory.charge_later(150, first)  # a later engine, of the same config
    assert looking(first).determine_available_memory() == 850
    assert looking(engine_config()).determine_available_memory() == 1000
    known = id(first.device_config)
    del first
    assert known not in memory._later


def served(source: str, *, published: bool, taken: int | None, segments: int = 900) -> Any:
    """An attachment to a model whose load took so many bytes."""
    module = nn.Module()
    if taken is not None:
        module.__dict__["_torchwcache_load_nbytes"] = {"allocated": taken, "reserved": taken + 50}
    report = SimpleNamespace(source=source, published=published, mapped_nbytes=800)
    return SimpleNamespace(report=report, model=module, memory_nbytes=segments if published or source != "disk" else 0)


@pytest.fixture(params=[False, True], ids=["0.26", "0.27"])
def looks_at_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether vLLM looks at what is free on the device."""
    module = ModuleType("vllm.utils.mem_utils")
    result = type("MemoryProfilingResult", (), {"total_consumed": 0} if request.param else {})
    module.MemoryProfilingResult = result  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return bool(request.param)


def test_a_start_is_charged_what_the_load_took(looks_at_the_device: bool) -> None:
    taken = 1050 if looks_at_the_device else 1000  # since 0.27 by what is free on the device: all that the allocator has
    for source in ("cache", "waited"):
        hit = served(source, published=False, taken=1000)
        assert memory.external_nbytes(hit, 10) == memory.not_counted_nbytes(hit, 10) == taken - 10
    # Of a first start vLLM has counted the segments already, and the copies.
    assert memory.not_counted_nbytes(served("disk", published=True, taken=1000), 10) == taken - 900 - 10
    assert memory.not_counted_nbytes(served("disk", published=True, taken=1000, segments=1200), 10) == taken - 1200 - 10
    assert memory.not_counted_nbytes(served("disk", published=False, taken=1000), 10) == 0
    unmeasured = served("cache", published=False, taken=None)
    assert memory.external_nbytes(unmeasured, 10) == memory.not_counted_nbytes(unmeasured, 10) == 800
    assert memory.not_counted_nbytes(served("disk", published=True, taken=None), 10) == 0


def test_what_this_process_takes_is_counted_as_vllm_counts(looks_at_the_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([{"allocated": 5, "reserved": 20}, {"allocated": 7, "reserved": 60}])
    monkeypatch.setattr(engine_memory, "allocator_nbytes", lambda device, collect: next(counts))
    assert engine_memory.OwnMemory("cuda:0").nbytes(memory.counted_by_vllm()) == (40 if looks_at_the_device else 2)
    monkeypatch.setattr(engine_memory, "allocator_nbytes", lambda device, collect: {})
    assert engine_memory.OwnMemory("cpu").nbytes(memory.counted_by_vllm()) == 0


@pytest.mark.parametrize("asks", [False, True])
def test_a_hit_leaves_as_much_for_the_kv_cache_as_a_load(
    looks_at_the_device: bool, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies that an attachment makes before vLLM's first look, or before the load that vLLM measures, nobody but us counts."""
    if asks and not looks_at_the_device:
        pytest.skip("vLLM asks since 0.32, and looks since 0.27")
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
    module = ModuleType("vllm.model_executor.model_loader.base_loader")
    module.BaseModelLoader = type("BaseModelLoader", (), {"get_external_weight_memory": None} if asks else {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    copies = {"allocated": 10, "reserved": 20}
    budget, taken = 5000, 1050 if looks_at_the_device else 1000
    own: Any = SimpleNamespace(nbytes=copies.__getitem__)
    external = memory.external_nbytes(served("cache", published=False, taken=1000), memory.counted_before_the_load(own))
    # By what vLLM finds to have become less on the device since its first look.
    counted = copies["reserved"] if looks_at_the_device and not asks else 0
    assert budget - external - counted == budget - taken


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


# ---- kernels that layers want compiled -----------------------------------------------------------------------------------------


class WarmupRegistry:
    """As vLLM's ``JitWarmupRegistry``."""

    active: ClassVar[WarmupRegistry | None] = None

    def __init__(self, vllm_config: Any) -> None:
        self._registrations: dict[Any, list[Any]] = {}

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        before, WarmupRegistry.active = WarmupRegistry.active, self
        try:
            yield
        finally:
            WarmupRegistry.active = before


class JitKernel:
    def register_warmup(self, *args: Any, **kwargs: Any) -> None:
        if WarmupRegistry.active is not None:
            said = WarmupRegistry.active._registrations.setdefault(self, [])
            said += [(args, kwargs)] if (args, kwargs) not in said else []


JIT_KERNEL = JitKernel()


class SayingLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        JIT_KERNEL.register_warmup(torch.float32, width=width)


SAID = {JIT_KERNEL: [((torch.float32,), {"width": 4}), ((torch.float32,), {"width": 8})]}


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> adapter.VLLMAdapter:
    """An adapter over what stands in for vLLM where it builds, and over its registry of kernels."""
    for name, attributes in {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.utils": {
            "initialize_model": lambda **_: nn.Sequential(SayingLayer(4), SayingLayer(8), SayingLayer(4))
        },
        "vllm.model_executor.warmup": {},
        "vllm.model_executor.warmup.jit_warmup": {"JitWarmupRegistry": WarmupRegistry},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(adapter.Registries, "of", classmethod(lambda cls, vllm_config: cls({})))
    monkeypatch.setattr(adapter.VLLMAdapter, "_engine_context", contextlib.nullcontext)
    made = adapter.VLLMAdapter(SimpleNamespace(), SimpleNamespace(dtype=torch.float32), None, stage="finished")
    made.put_off = True
    return made


def test_a_runner_hears_the_layers_of_a_module_that_was_built_before_it(building: adapter.VLLMAdapter) -> None:
    cfg = ModelConfig("m")
    module, _ = building.build(cfg)
    building.prepare(cfg, module)
    runner = WarmupRegistry(None)
    with runner.activate():
        building.process(cfg, module)
        assert runner._registrations == SAID
        runner._registrations.clear()
        building.process(cfg, module)  # the caller's, where it was not put off
    assert runner._registrations == {}


def test_a_runner_does_not_hear_the_layers_of_a_module_that_does_not_serve(building: adapter.VLLMAdapter) -> None:
    runner, cfg = WarmupRegistry(None), ModelConfig("m")
    with runner.activate():
        with building.scratch_build(cfg):
            pass
        assert runner._registrations == {}
        JIT_KERNEL.register_warmup()  # it goes on listening
        assert list(runner._registrations) == [JIT_KERNEL]


def test_where_no_runner_listens_nobody_is_told(building: adapter.VLLMAdapter) -> None:
    cfg = ModelConfig("m")
    module, _ = building.build(cfg)
    building.prepare(cfg, module)
    building.process(cfg, module)


def test_a_vllm_whose_layers_say_nothing(building: adapter.VLLMAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.model_executor.warmup.jit_warmup")
    assert building.build(ModelConfig("m"))


def test_a_vllm_that_notes_it_otherwise_builds_all_the_same(
    building: adapter.VLLMAdapter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Next(WarmupRegistry):
        @contextlib.contextmanager
        def activate(self) -> Iterator[None]:
            with super().activate():
                yield
            self.said = self.__dict__.pop("_registrations")

    monkeypatch.setattr(sys.modules["vllm.model_executor.warmup.jit_warmup"], "JitWarmupRegistry", Next)
    cfg = ModelConfig("m")
    module, _ = building.build(cfg)
    assert "notes kernels otherwise" in caplog.text
    building.prepare(cfg, module)
    building.process(cfg, module)


def test_the_engines_configuration_is_found_wherever_it_is_held() -> None:
    live = type("VllmConfig", (), {"__module__": "vllm.config.vllm"})()
    module = nn.Sequential(nn.Linear(1, 1))
    module.vllm_config = live  # type: ignore[assignment]
    module[0].backend = SimpleNamespace(parts=[1, {"cache": live}])  # type: ignore[assignment]
    assert sorted(adapter._config_paths(module)) == ["0.backend.parts[1]['cache']", "vllm_config"]


# ---- what a load never wrote ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """As vLLM's layers: one weight without values for three projections, a scale that has a default, padded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(64, 4), requires_grad=False)
        self.qkv = nn.Parameter(torch.empty(12, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(4), requires_grad=False)
        self.k_scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.input_scale = nn.Parameter(torch.empty(3), requires_grad=False)
        self.input_scale[:] = torch.finfo(torch.float32).min
        self.online = nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
        self.ran = False

    def load_weights(self, weights: dict[str, torch.Tensor]) -> set[str]:
        for number, name in enumerate(("q", "k", "v")):
            if name in weights:
                self.qkv.data[4 * number : 4 * number + 4].copy_(weights[name])
        self.embed[:40].data.copy_(weights["embed"])
        self.embed[40:].data.fill_(0)
        return {"qkv", "embed"}  # by their names, all is there


WEIGHTS = {"embed": torch.full((40, 4), 2.0), **{name: torch.full((4, 4), 3.0) for name in "qkv"}}


@pytest.fixture(params=["loaded", "finished"])
def loading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An adapter over what stands in for vLLM's loaders; ``weights`` is what the checkpoint holds."""
    base, default = ModuleType("vllm.model_executor.model_loader.base_loader"), ModuleType("vllm.default_loader")
    found: Any = SimpleNamespace(weights=WEIGHTS, seen=[])

    def initialize_model(vllm_config: Any, *, prefix: str = "", model_config: Any = None) -> nn.Module:
        return Attention()

    base.initialize_model = initialize_model  # type: ignore[attr-defined]

    class Loader:
        def __init__(self, load_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(found.weights)

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            model = base.initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)  # type: ignore[attr-defined]
            self.load_weights(model, model_config)
            found.seen.append(model.qkv.isnan().any().item())  # what is done to finished weights sees no pattern
            return model

    default.DefaultModelLoader = Loader  # type: ignore[attr-defined]
    config, utils = ModuleType("vllm.config"), ModuleType("vllm.utils.torch_utils")
    config.set_current_vllm_config = contextlib.nullcontext  # type: ignore[attr-defined]
    utils.set_default_torch_dtype = contextlib.nullcontext  # type: ignore[attr-defined]
    loaders = ModuleType("vllm.model_executor.model_loader")
    loaders.base_loader, loaders.default_loader = base, default  # type: ignore[attr-defined]
    for name, module in {
        "vllm": ModuleType("vllm"),
        "vllm.model_executor": ModuleType("vllm.model_executor"),
        loaders.__name__: loaders,
        base.__name__: base,
        f"{loaders.__name__}.default_loader": default,
        config.__name__: config,
        "vllm.utils": ModuleType("vllm.utils"),
        utils.__name__: utils,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(adapter.Registries, "of", classmethod(lambda cls, vllm_config: cls({})))
    stage = request.param
    found.adapter = adapter.VLLMAdapter(SimpleNamespace(), SimpleNamespace(dtype=torch.float32), None, stage=stage)
    yield found
    assert base.initialize_model is initialize_model  # type: ignore[attr-defined]
    assert not any(found.seen)


def load(loading: Any, *, publishes: bool) -> LoadResult:
    cfg = ModelConfig("m")
    result = load_unpublished(cfg, loading.adapter, memory_for(cfg.device), publishes=publishes)
    assert "load_weights" not in result.module.__dict__
    return result


def test_a_fused_weight_of_which_one_part_was_not_loaded_is_refused(loading: Any) -> None:
    loading.weights = {name: tensor for name, tensor in WEIGHTS.items() if name != "k"}
    result = load(loading, publishes=True)
    assert result.unwritten == ("qkv",)
    module: Any = result.module
    assert module.qkv.sum(1).tolist() == [12.0] * 4 + [0.0] * 4 + [12.0] * 4
    with pytest.raises(NotAFunctionOfCheckpointError, match=r"left 1 of the model's tensors.*: qkv\. See"):
        check_publishable(ModelConfig("m"), result, "none")


def test_what_was_loaded_or_has_a_default_is_not(loading: Any) -> None:
    """Padded rows of an embedding are zeroed by vLLM's loader; scales that no checkpoint needs have values."""
    result = load(loading, publishes=True)
    assert result.unwritten == ()
    module: Any = result.module
    assert module.embed.sum().item() == 40 * 4 * 2.0
    assert module.k_scale.item() == -1.0
    assert module.online.is_meta


def test_what_is_not_going_to_be_published_is_loaded_as_without_us(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loading.weights = {name: tensor for name, tensor in WEIGHTS.items() if name != "k"}
    monkeypatch.setattr(adapter, "watched", None)  # is not called
    assert load(loading, publishes=False).unwritten == ()


class Draft(nn.Module):
    """As a draft of vLLM's: the names are what counts."""

    def __init__(self, width: int = 4, *, tied: bool = False, **own: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(6, width)
        self.model.layers = nn.ModuleList([nn.Module()])
        self.model.layers[0].shared_head = nn.Module()
        self.model.layers[0].shared_head.head = nn.Linear(4, 6, bias=False)
        self.model.layers[0].fc = nn.Linear(4, 4, bias=False)
        self.lm_head = nn.Linear(4, 6, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.__dict__.update({f"has_own_{name}": value for name, value in own.items()})


EMBED, HEAD, SHARED, FC = (
    "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.shared_head.head.weight", "model.layers.0.fc.weight",
)  # fmt: skip


def left(draft: Draft, method: str | None = "eagle", *, stages: int = 1, kind: str = "") -> set[str]:
    speculative = SimpleNamespace(
        method=method,
        target_model_config=SimpleNamespace(get_hidden_size=lambda: 4),
        use_gemma4_mtp=lambda: kind == "gemma4",
        use_step3p5_mtp=lambda: kind == "step3p5",
    )
    config = SimpleNamespace(
        speculative_config=speculative if method else None, parallel_config=SimpleNamespace(pipeline_parallel_size=stages)
    )
    return set(not_given_by_target([name for name, _ in draft.named_parameters()], draft, config))


def test_what_a_draft_gets_from_its_target_may_be_missing() -> None:
    assert left(Draft(), "mtp") == left(Draft(embed_tokens=False, lm_head=False)) == {FC}
    assert left(Draft(embed_tokens=True, lm_head=False)) == {EMBED, FC}
    assert left(Draft(embed_tokens=False, lm_head=True)) == {HEAD, SHARED, FC}
    assert left(Draft(8, embed_tokens=False), "eagle3") == {EMBED, FC}
    assert left(Draft(), "mtp", stages=2) == {EMBED, FC}
    assert left(Draft(), "mtp", kind="gemma4") == left(Draft(), "mtp", kind="step3p5") == {HEAD, SHARED, FC}
    assert left(Draft(), "draft_model") == left(Draft(), None) == {EMBED, HEAD, SHARED, FC}


def test_a_weight_that_the_draft_uses_in_another_place_too_is_not_given() -> None:
    assert left(Draft(tied=True, embed_tokens=False, lm_head=False)) == {FC}
    assert left(Draft(tied=True, embed_tokens=False, lm_head=True)) == {EMBED, SHARED, FC}


def test_a_draft_is_asked_for_what_its_target_gives(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "not_given_by_target", lambda names, module, config: names[1:])
    loading.weights = {name: tensor for name, tensor in WEIGHTS.items() if name != "k"}
    cfg = ModelConfig("m", role=Role.DRAFT)
    assert load_unpublished(cfg, loading.adapter, memory_for(cfg.device), publishes=True).unwritten == ()


@pytest.mark.parametrize("gated", [True, False])
def test_experts_that_a_kernel_wants_larger(gated: bool) -> None:
    """128 of 100 in between, and 64 of 48 hidden."""
    layer, model = nn.Module(), nn.Sequential()
    layer.w13_weight = nn.Parameter(torch.zeros(3, 256 if gated else 128, 64), requires_grad=False)
    layer.w2_weight = nn.Parameter(torch.zeros(3, 64, 128), requires_grad=False)
    sizes = {"hidden_dim_unpadded": 48, "intermediate_size_per_partition_unpadded": 100, "is_act_and_mul": gated}
    layer.moe_config = SimpleNamespace(**sizes)  # type: ignore[assignment]
    model.add_module("experts", layer)
    for parts in _unpadded(model).values():
        for part in parts:
            part.fill_(1)
    assert sorted(_unpadded(model)) == ["experts.w13_weight", "experts.w2_weight"]
    up: Any = layer.w13_weight
    assert up.sum().item() == 3 * (2 if gated else 1) * 100 * 48
    assert up[0, :100, :48].all()
    assert not gated or up[0, 128:228, :48].all()
    down: Any = layer.w2_weight
    assert down.sum().item() == down[:, :48, :100].sum().item() == 3 * 100 * 48
    layer.moe_config = SimpleNamespace()  # type: ignore[assignment]
    assert _unpadded(model) == {}  # before vLLM 0.32
