"""The adapter for SGLang, as far as it can be tested without SGLang: stand-ins are put where it imports from."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchwcache.config import Mode, Policy
from torchwcache.errors import ConfigError, PluginError, RefusedError
from torchwcache_sglang import guards, hooks, leases, memory, plugin, refusals, seams, tokenizer_workers
from torchwcache_sglang.canonical import plain, without_itself
from torchwcache_sglang.context import environment_names, option_names
from torchwcache_sglang.options import COUNTING, NEUTRAL
from torchwcache_sglang.registries import Registries
from torchwcache_sglang.settings import asked_by_environment, options_from, split_extra_config


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHWCACHE_MODE", "TORCHWCACHE_FALLBACK", "TORCHWCACHE_SOCKET"):
        monkeypatch.delenv(name, raising=False)


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> types.ModuleType:
    """Put a module where ``import`` finds it, and its parents, too."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if not (end < len(parts) and path in sys.modules):
            module = types.ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
        if end > 1:
            monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[path], raising=False)
    for key, value in attributes.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)
    return sys.modules[name]


# ---- what was asked for ------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_for_unless_somebody_says_so() -> None:
    assert options_from(None, {}) is None
    assert options_from({}, {}).mode is Mode.DAEMON
    assert options_from({"mode": "client"}, {}).mode is Mode.CLIENT
    assert options_from({"mode": "off"}, {}) is None
    assert options_from(None, {"TORCHWCACHE_MODE": "daemon"}).mode is Mode.DAEMON
    assert options_from({"mode": "client"}, {"TORCHWCACHE_MODE": "off"}) is None
    assert options_from({}, {}).policies.on_refused is Policy.LOAD
    assert asked_by_environment({"TORCHWCACHE_MODE": "client"})
    assert not asked_by_environment({"TORCHWCACHE_MODE": "off"})
    assert not asked_by_environment({})


def test_a_misspelt_option_is_an_error() -> None:
    with pytest.raises(ConfigError, match="on_missmatch"):
        options_from({"on_missmatch": "error"}, {})


@pytest.mark.parametrize(
    ("extra", "ours", "theirs"),
    [
        ("{}", None, {}),
        ("", None, {}),
        (None, None, {}),
        ('{"num_threads": 4}', None, {"num_threads": 4}),
        ({"torchwcache": {"mode": "client"}, "num_threads": 4}, {"mode": "client"}, {"num_threads": 4}),
        ({"torchwcache": True}, {}, {}),
    ],
)
def test_our_options_are_taken_out_of_the_loaders(extra: object, ours: object, theirs: object) -> None:
    before = json.dumps(extra)
    assert split_extra_config(extra) == (ours, theirs)
    assert json.dumps(extra) == before


def test_our_options_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        split_extra_config({"torchwcache": "daemon"})


# ---- what counts -------------------------------------------------------------------------------------------------------------


def test_no_option_is_in_both_lists() -> None:
    assert not NEUTRAL & COUNTING
    assert {"context_length", "max_running_requests", "port", "mem_fraction_static", "random_seed"} <= NEUTRAL
    assert {"quantization", "kv_cache_dtype", "json_model_override_args", "ep_size", "tp_size", "moe_runner_backend"} <= COUNTING


def test_options_are_listed_in_either_way_of_declaring_them() -> None:
    import dataclasses

    import msgspec

    @dataclasses.dataclass
    class Old:
        port: int = 1

    class New(msgspec.Struct):
        port: int = 1

    assert option_names(Old()) == option_names(New()) == ["port"]


def test_variables_count_unless_they_are_known_not_to() -> None:
    environ = {
        "SGLANG_NEW_THING": "1",
        "SGLANG_PLUGINS": "x",
        "SGLANG_HOST_IP": "::1",
        "PATH": "/",
        "SGLANG_TORCH_PROFILER_DIR": "/",
    }
    assert environment_names(environ) == ("SGLANG_NEW_THING",)


class Kind(enum.Enum):
    ONE = 1


class Config:
    def __init__(self, size: int) -> None:
        self.size = size


def test_values_without_a_canonical_form_are_told_apart_by_what_they_hold() -> None:
    assert plain({"a": (1, {2, 3})}) == {"a": [1, [2, 3]]}
    assert plain(Config(1)) == plain(Config(1)) != plain(Config(2))
    assert plain(object()) == plain(object())
    assert plain(sys) == plain(sys) != plain(types)
    loop: dict[str, Any] = {"a": 1}
    loop["again"] = {"me": loop}
    assert plain(loop) == {"a": 1, "again": {"me": ("again", 2)}}
    knot = Config(1)
    knot.again = knot  # type: ignore[attr-defined]
    assert plain(knot) == {**plain(Config(1)), "again": ("again", 1)}
    quantization = {"quant_method": "fp8", "hf_config": knot}
    assert without_itself({"quantization_config": quantization}) == {"quantization_config": {"quant_method": "fp8"}}
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValueError, match="more than 32 levels"):
        plain(deep)
    assert plain(plain) == plain(plain)


# ---- registries --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ropes(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    registry: dict[str, object] = {"before": 1}
    stand_in(monkeypatch, "sglang.srt.layers.rotary_embedding.factory", _ROPE_DICT=registry)
    return registry


def test_a_build_starts_with_empty_registries_and_leaves_them_as_they_were(ropes: dict[str, object]) -> None:
    registries = Registries()
    with registries.apart():
        assert ropes == {}
        ropes["made"] = 2
    assert ropes == {"before": 1}
    ropes["made"] = 3
    registries.keep()
    assert ropes == {"before": 1, "made": 3}


def test_also_when_the_build_fails(ropes: dict[str, object]) -> None:
    def build() -> None:
        with Registries().apart():
            ropes["made"] = 2
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        build()
    assert ropes == {"before": 1}


# ---- hooks -------------------------------------------------------------------------------------------------------------------


class LoadConfig:
    def __init__(self, extra: dict[str, Any] | None = None) -> None:
        self.model_loader_extra_config = extra or {}
        self.load_format = types.SimpleNamespace(value="auto")


class BaseModelLoader:
    preloaded_weights_bytes = 0

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    def load_model(self) -> None:
        """Load."""


@pytest.fixture
def sglang_loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    found = stand_in(
        monkeypatch,
        "sglang.srt.model_loader.loader",
        BaseModelLoader=BaseModelLoader,
        DefaultModelLoader=DefaultModelLoader,
        _initialize_model=lambda model_config, load_config: None,
        _get_quantization_config=lambda model_config, load_config: None,
    )
    stand_in(monkeypatch, "sglang.srt.arg_groups.arg_utils", namespace_of=lambda cls: {})
    stand_in(monkeypatch, "sglang.srt.runtime_context", get_context=lambda: None, get_server_args=lambda: types.SimpleNamespace())
    monkeypatch.setattr(seams, "installed_version", lambda: "0.5.23")
    monkeypatch.setitem(seams.KNOWN, "0.5.23", seams.digest_of(seams.loader_functions(found)))
    monkeypatch.delitem(sys.modules, "torchwcache_sglang.loader", raising=False)
    yield found
    sys.modules.pop("torchwcache_sglang.loader", None)


def make_default(load_config: LoadConfig, model_config: object = None) -> DefaultModelLoader:
    return DefaultModelLoader(load_config)


def test_off_is_sglangs_own_loader_without_our_options(sglang_loader: types.ModuleType) -> None:
    config = LoadConfig({"num_threads": 2})
    loader = hooks.around_get_model_loader(make_default, config, object())
    assert type(loader) is DefaultModelLoader
    assert loader.load_config is config
    off = hooks.around_get_model_loader(make_default, LoadConfig({"torchwcache": {"mode": "off"}, "num_threads": 2}), object())
    assert off.load_config.model_loader_extra_config == {"num_threads": 2}


def test_asked_for_it_is_ours_around_it(sglang_loader: types.ModuleType) -> None:
    config = LoadConfig({"torchwcache": {"mode": "client"}, "num_threads": 2})
    loader = hooks.around_get_model_loader(make_default, config, object())
    assert type(loader).__name__ == "CacheLoader"
    assert type(loader.inner) is DefaultModelLoader
    assert loader.inner.load_config.model_loader_extra_config == {"num_threads": 2}
    assert "torchwcache" in config.model_loader_extra_config, "the engine's own config stays as it is"


def test_weights_of_ones_own_are_updated_by_sglangs_own_loader(
    sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHWCACHE_MODE", "daemon")
    monkeypatch.setattr(leases, "_shared", False)

    def update(updater: object) -> object:
        return hooks.around_get_model_loader(make_default, LoadConfig(), object())

    assert type(guards.refusing_in_updater("update_weights_from_disk")(update, object())) is DefaultModelLoader
    assert type(update(object())).__name__ == "CacheLoader"


def test_what_is_not_cached_is_said_or_stops_the_start(
    sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class DummyModelLoader(BaseModelLoader):
        pass

    monkeypatch.setenv("TORCHWCACHE_MODE", "daemon")
    with caplog.at_level(logging.WARNING):
        loader = hooks.around_get_model_loader(lambda config, model: DummyModelLoader(config), LoadConfig(), object())
    assert type(loader) is DummyModelLoader
    assert "DummyModelLoader (--load-format auto) loads in a way of its own" in caplog.text
    monkeypatch.setenv("TORCHWCACHE_FALLBACK", "error")
    with pytest.raises(RefusedError, match="way of its own"):
        hooks.around_get_model_loader(lambda config, model: DummyModelLoader(config), LoadConfig(), object())


# An example of a value for each option that is refused; its value where it is off; and whether only drafts are refused for it.
REFUSED_OPTIONS: dict[str, tuple[object, object]] = {
    "enable_eplb": (True, False),
    "enable_elastic_expert_backup": (True, False),
    "elastic_ep_backend": ("mooncake", None),
    "enable_weights_cpu_backup": (True, False),
    "enable_draft_weights_cpu_backup": (True, False),
    "cpu_offload_gb": (3, 0),
    "offload_group_size": (2, -1),
    "ple_offload_embedding": ("disk", "none"),
    "enable_paged_experts": (True, False),
    "kt_weight_path": ("/weights", None),
    "dwdp_size": (2, 1),
    "rl_quant_profile": ("/profile", None),
    "modelopt_quant": ("fp8", None),
    "quantize_and_serve": (True, False),
    "weight_cache_mode": ("client", "off"),
    "startup_weight_load_mode": ("overlap", "serial"),
}


def test_every_refused_option_has_an_example() -> None:
    assert set(refusals.OPTIONS) == set(REFUSED_OPTIONS)


@pytest.mark.parametrize("option", REFUSED_OPTIONS)
def test_options_that_write_or_move_weights_are_refused(
    sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    monkeypatch.setenv("TORCHWCACHE_MODE", "daemon")
    on, off = REFUSED_OPTIONS[option]
    kind = type("ServerArgs", (), {"__dataclass_fields__": {option: None}})
    arguments = kind()
    monkeypatch.setattr(sys.modules["sglang.srt.runtime_context"], "get_server_args", lambda: arguments)
    model = types.SimpleNamespace(is_draft_model="draft" in option)
    setattr(arguments, option, on)
    assert type(hooks.around_get_model_loader(make_default, LoadConfig(), model)) is DefaultModelLoader
    assert "--" + option.replace("_", "-") in caplog.text
    setattr(arguments, option, off)
    assert type(hooks.around_get_model_loader(make_default, LoadConfig(), model)).__name__ == "CacheLoader"
    if "draft" in option:
        setattr(arguments, option, on)
        target = types.SimpleNamespace(is_draft_model=False)
        assert type(hooks.around_get_model_loader(make_default, LoadConfig(), target)).__name__ == "CacheLoader"


def test_a_merged_adapter_is_refused(
    sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHWCACHE_MODE", "daemon")
    model = types.SimpleNamespace(pointer_head=object())
    assert type(hooks.around_get_model_loader(make_default, LoadConfig(), model)) is DefaultModelLoader
    assert "a LoRA adapter is merged into the weights while loading" in caplog.text
    model.pointer_head = None
    assert type(hooks.around_get_model_loader(make_default, LoadConfig(), model)).__name__ == "CacheLoader"


# ---- self-check --------------------------------------------------------------------------------------------------------------


class Runner:
    def __init__(self, loader: object, extra: dict[str, Any] | None = None) -> None:
        self.loader, self.load_config = loader, LoadConfig(extra)
        self.pre_model_load_memory = 10.0

    def load_model(self) -> None:
        pass


def test_a_model_that_went_past_the_cache_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    config = {"torchwcache": {"mode": "client"}}
    hooks.around_load_model(Runner.load_model, Runner(DefaultModelLoader(LoadConfig()), config))
    assert "SGLang loaded by itself, with DefaultModelLoader" in caplog.text
    strict = {"torchwcache": {"mode": "client", "fallback": "error"}}
    with pytest.raises(PluginError, match="did not fire"):
        hooks.around_load_model(Runner.load_model, Runner(DefaultModelLoader(LoadConfig()), strict))


def test_one_that_was_refused_or_not_asked_for_is_not(caplog: pytest.LogCaptureFixture) -> None:
    loader = DefaultModelLoader(LoadConfig())
    hooks.around_load_model(Runner.load_model, Runner(loader))
    setattr(loader, hooks._REFUSED, True)
    hooks.around_load_model(Runner.load_model, Runner(loader, {"torchwcache": {"mode": "client", "fallback": "error"}}))
    assert not caplog.text


def test_what_lay_in_memory_before_is_accounted_for_where_sglang_does_not_ask() -> None:
    loader = types.SimpleNamespace(baseline_nbytes=3 << 30)
    runner = Runner(loader)
    hooks.around_load_model(Runner.load_model, runner)
    assert runner.pre_model_load_memory == 13.0

    class Asking(Runner):
        def account_preloaded_weights(self, nbytes: int) -> None:
            pass

    asking = Asking(loader)
    hooks.around_load_model(Runner.load_model, asking)
    assert asking.pre_model_load_memory == 10.0
    loader.baseline_nbytes = -(1 << 30)  # what it asks for is never negative
    hooks.around_load_model(Runner.load_model, asking)
    assert asking.pre_model_load_memory == 9.0


@pytest.mark.parametrize(("asks", "nbytes", "after"), [(False, 2, 12.0), (False, -1, 9.0), (True, 2, 10.0), (True, -1, 9.0)])
def test_a_draft_is_accounted_for_where_the_kv_cache_is_sized(asks: bool, nbytes: int, after: float) -> None:
    """That is by its target's baseline; nobody looks at a draft's."""
    members = {"account_preloaded_weights": lambda runner, nbytes: None} if asks else {}
    kind = type("DraftedRunner", (Runner,), members)
    target, draft = kind(types.SimpleNamespace(baseline_nbytes=0)), kind(types.SimpleNamespace(baseline_nbytes=nbytes << 30))
    draft.is_draft_worker = True  # type: ignore[attr-defined]
    for runner in (target, draft):
        hooks.around_load_model(Runner.load_model, runner)
    assert target.pre_model_load_memory == after


@settings(max_examples=200)
@given(
    free=st.integers(1 << 36, 1 << 37), taken=st.integers(1, 1 << 36), more=st.integers(-(1 << 26), 1 << 26),
    copied=st.integers(0, 1 << 24), fraction=st.floats(0.05, 0.98), source=st.sampled_from(["cache", "waited", "disk"]),
    evicted=st.sampled_from([0, 1 << 30]),
)  # fmt: skip
def test_the_kv_cache_comes_out_as_from_disk(
    free: int, taken: int, more: int, copied: int, fraction: float, source: str, evicted: int
) -> None:
    segments = max(1, taken + more)
    module = nn.Module()
    module.__dict__["_torchwcache_load_nbytes"] = {"allocated": 0, "reserved": taken}
    report = types.SimpleNamespace(source=source, mapped_nbytes=segments - copied, copied_nbytes=1)
    attachment: Any = types.SimpleNamespace(model=module, report=report, memory_nbytes=segments)
    measured = (free - segments if source == "cache" else free) - evicted
    baseline = measured + memory.baseline_nbytes(attachment, copied, fraction, evicted)
    kv = free - segments - copied - baseline * (1 - fraction)
    assert kv == pytest.approx(free - taken - free * (1 - fraction), abs=2)


def test_what_nobody_measured_is_taken_to_be_what_is_mapped() -> None:
    report = types.SimpleNamespace(source="cache", mapped_nbytes=100, copied_nbytes=1)
    attachment: Any = types.SimpleNamespace(model=nn.Module(), report=report, memory_nbytes=128)
    assert memory.baseline_nbytes(attachment, 1, 0.5) == 100
    assert memory.baseline_nbytes(attachment, 1, 0.5, 7) == 107
    report.source = "disk"
    assert memory.baseline_nbytes(attachment, 1, 0.5) == 0
    attachment.memory_nbytes = 0
    attachment.model.__dict__["_torchwcache_load_nbytes"] = {"allocated": 0, "reserved": 100}
    assert memory.baseline_nbytes(attachment, 1, 0.5) == 0
    assert memory.baseline_nbytes(attachment, 1, 0.5, 7) == 7


class Group:
    """Ranks, of which this is one: what the others say is known."""

    rank = 0

    def __init__(self, *others: str) -> None:
        self.others, self.size = others, 1 + len(others)
        self.said: list[str] = []

    def exchange(self, word: str, what: str) -> tuple[str, ...]:
        self.said.append(word)
        return (word, *self.others)


def test_all_ranks_have_the_same_baseline() -> None:
    """The least of what would have been free: each computes its tokens by it, and nobody compares those."""
    for ranks in (
        [(60, 40), (100, 0)],  # one rank's weights were there already, the other's were not
        [(60, 20), (80, 0)],  # something was evicted for the first; as much as the second has free
        [(80, 20), (60, 0)],  # and here the second has less: what others use there
        [(80, 40), (70, 50)],  # pipeline stages, of which one is larger
        [(80, -1), (80, -3)],
    ):
        words = [f"{free} {added}" for free, added in ranks]
        asked = [memory.agreed_nbytes(Group(*words[:i], *words[i + 1 :]), *ranks[i]) for i in range(len(ranks))]
        assert len(set(asked)) == 1
        baseline = min(free for free, _ in ranks)  # SGLang's own
        assert baseline + asked[0] == min(free + added for free, added in ranks)
    assert memory.agreed_nbytes(Group(), 100, 7) == 7


GIB = 1 << 30


@pytest.fixture
def load_on_gpu(sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A load by our loader on a GPU of 100 GiB, of which 60 are free and 8 the engine's own, for a server that is to use 0.8 of it.

    Gives a function that loads, which returns the loader and how much was to be free.
    """
    import torchwcache_sglang.loader as ours
    from torchwcache.config import Role

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (60 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 8 * GIB)
    monkeypatch.setattr(ours, "static_fraction", lambda: 0.8)
    monkeypatch.setattr(ours, "OwnMemory", lambda device: types.SimpleNamespace(nbytes=lambda count: 0))
    monkeypatch.setattr(ours, "SGLangAdapter", lambda *parts: None)
    monkeypatch.setattr(leases, "_shared", False)
    monkeypatch.setattr(leases, "_mapped_nbytes", 0, raising=False)

    def load(*, nbytes: int, hit: bool, draft: bool = False, group: Any = None, evicted: int = 0) -> tuple[Any, int]:
        wanted: list[int] = []
        report = types.SimpleNamespace(source="cache" if hit else "disk", mapped_nbytes=nbytes, copied_nbytes=0)
        module = nn.Linear(1, 1)
        attachment = types.SimpleNamespace(memory_nbytes=nbytes, report=report, model=module)

        class Start:
            shared, evicted_nbytes = True, evicted

            def __init__(self, *_: Any, **__: Any) -> None:
                self.attachment = attachment if hit else None

            def decide(self) -> bool:
                return hit

            def needed_nbytes(self) -> int:
                return nbytes + GIB

            def free_up(self, nbytes: int, free: Any) -> int:
                wanted.append(nbytes)
                return 0

            def finish(self) -> Any:
                return attachment

        cfg = types.SimpleNamespace(device="cuda:0", role=Role.DRAFT if draft else Role.TARGET)
        monkeypatch.setattr(ours, "RankStart", Start)
        monkeypatch.setattr(ours, "model_config_for", lambda *_, **__: cfg)
        monkeypatch.setattr(ours, "ranks_of", lambda *_, **__: group or Group())
        loader = ours.CacheLoader(make_default(LoadConfig()), options_from({"mode": "client"}, {}))
        device = types.SimpleNamespace(device_type="cuda", gpu_id=0)
        assert loader.load_model(model_config=None, device_config=device) is module
        return loader, wanted[0]

    return load


def test_ranks_agree_on_the_baseline_when_the_model_is_there(load_on_gpu: Any) -> None:
    others_miss = Group(f"{100 * GIB} 0")
    loader, _ = load_on_gpu(nbytes=40 * GIB, hit=True, group=others_miss)
    assert others_miss.said == [f"{60 * GIB} {40 * GIB}"]
    assert loader.baseline_nbytes == loader.preloaded_weights_bytes == 40 * GIB
    loader, _ = load_on_gpu(nbytes=40 * GIB, hit=False, evicted=30 * GIB, group=Group(f"{80 * GIB} 0"))
    assert loader.baseline_nbytes == loader.preloaded_weights_bytes == 20 * GIB


def test_what_the_engine_has_already_is_not_evicted_for_once_more(load_on_gpu: Any) -> None:
    """A draft comes after its target: others' weights had to go for the target's share, all over again."""
    assert load_on_gpu(nbytes=20 * GIB, hit=True)[1] == (80 - 20 - 8) * GIB
    assert load_on_gpu(nbytes=2 * GIB, hit=True, draft=True)[1] == (80 - 20 - 2 - 8) * GIB
    assert load_on_gpu(nbytes=3 * GIB, hit=False, draft=True)[1] == (80 - 20 - 2 - 8) * GIB
    assert load_on_gpu(nbytes=70 * GIB, hit=False, draft=True)[1] == 71 * GIB  # what a load needs, it needs


def test_what_nobody_uses_makes_room_for_a_model_that_is_not_cached(load_on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a start that asks for the cache would end where one that does not would have had the memory."""
    import torchwcache_sglang.loader as ours
    from torchwcache_sglang import unshared

    state = {"free": 60 * GIB}
    asked: list[int] = []

    def free_up(socket: str, memory: Any, nbytes: int, free: Any) -> int:
        asked.append(nbytes)
        state["free"] += 30 * GIB
        return 30 * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (state["free"], 100 * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(unshared, "memory_for", lambda device: types.SimpleNamespace(device="cuda:0"))
    monkeypatch.setattr(unshared, "free_up", free_up)
    monkeypatch.setattr(unshared, "static_fraction", lambda: 0.8)
    group = Group(f"{80 * GIB} 0")  # another rank, with less after that
    monkeypatch.setattr(ours, "ranks_of", lambda timeout_s, *, draft: group)
    monkeypatch.setattr(refusals, "refusal", lambda inner, model_config: "it is not known how")
    monkeypatch.setenv("TORCHWCACHE_MODE", "client")

    def start(model_config: Any) -> Any:
        loader = hooks.around_get_model_loader(make_default, LoadConfig(), model_config)
        assert type(loader) is DefaultModelLoader
        runner = Runner(loader)
        hooks.around_load_model(Runner.load_model, runner)
        return runner

    before = Runner(None).pre_model_load_memory
    assert start(types.SimpleNamespace()).pre_model_load_memory == before + 20
    assert asked == [(80 - 8) * GIB]
    assert start(types.SimpleNamespace(is_draft_model=True)).pre_model_load_memory == before
    assert start(None).pre_model_load_memory == before
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert start(types.SimpleNamespace()).pre_model_load_memory == before
    assert len(asked) == len(group.said) == 1


def test_no_fraction_is_known_where_no_server_was_started(sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is refused goes to SGLang's own loader there, too."""

    class Arguments:
        __dataclass_fields__ = ("mem_fraction_static",)
        mem_fraction_static = 0.7

    runtime = sys.modules["sglang.srt.runtime_context"]
    monkeypatch.setattr(runtime, "get_server_args", Arguments)
    assert memory.static_fraction() == 0.7

    def unpublished() -> Any:
        raise ValueError("not published")

    for name in ("get_server_args", "get_schedule"):
        monkeypatch.setattr(runtime, name, unpublished, raising=False)
    assert memory.static_fraction() is None
    monkeypatch.setattr(refusals, "refusal", lambda inner, model_config: "it is not known how")
    monkeypatch.setenv("TORCHWCACHE_MODE", "client")
    assert type(hooks.around_get_model_loader(make_default, LoadConfig(), object())) is DefaultModelLoader


def unbalanced(*, pre_model_load_memory: float, local_gpu_memory: float) -> None:
    """As SGLang's own."""
    if pre_model_load_memory < local_gpu_memory * 0.9:
        raise RuntimeError("The memory capacity is unbalanced")


def test_weights_in_the_cache_are_no_other_programs(
    sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of which one device may have more than another: SGLang would end the start before anything can be mapped or evicted."""
    cached = [("one", "cuda", 20), ("one", "cuda", 5), ("two", "cuda", 10), ("cpu", "memfd", 90)]

    class Connection(contextlib.AbstractContextManager[Any]):
        @staticmethod
        def connect(socket: str) -> Any:
            assert socket == "/run/socket"
            return Connection()

        def entries(self) -> Any:
            return [types.SimpleNamespace(device=device, memory=memory, nbytes=n * GIB) for device, memory, n in cached]

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("torchwcache.wire.client.DaemonConnection", Connection)
    monkeypatch.setenv("TORCHWCACHE_SOCKET", "/run/socket")

    def check(least: float, here: float = 140.0) -> None:
        hooks.around_balance_check(unbalanced, pre_model_load_memory=least, local_gpu_memory=here)

    with pytest.raises(RuntimeError, match="unbalanced"):
        check(110)  # nobody asked for the cache
    monkeypatch.setenv("TORCHWCACHE_MODE", "client")
    check(110)
    assert "weights in the cache are why" in caplog.text
    with pytest.raises(RuntimeError, match="unbalanced"):
        check(90)  # which is more than what is cached
    cached.clear()
    with pytest.raises(RuntimeError, match="unbalanced"):
        check(110)
    check(139)


@pytest.fixture
def loading_process(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object, object]]:
    """As in a scheduler: what loads models is imported. Gives what was registered."""
    registered: list[tuple[str, object, object]] = []

    class Registry:
        applied = 0

        @staticmethod
        def register(*hook: Any) -> None:
            registered.append(hook)

        @classmethod
        def apply_hooks(cls) -> None:
            cls.applied = len(registered)

    registry, kinds = Registry, types.SimpleNamespace(AROUND="around", AFTER="after")
    stand_in(monkeypatch, "sglang.srt.plugins.hook_registry", HookRegistry=registry, HookType=kinds)
    stand_in(monkeypatch, "sglang.srt.model_loader.loader", get_model_loader=make_default)
    stand_in(monkeypatch, "sglang.srt.model_executor.model_runner", ModelRunner=Runner)
    return registered


def targets(registered: list[Any]) -> list[str]:
    return [target for target, _, _ in registered]


def test_hooks_are_registered_where_models_are_loaded(loading_process: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    assert [target for target, _, _ in loading_process] == [hooks.GET_LOADER, hooks.LOAD_MODEL]
    loading_process.clear()
    monkeypatch.setenv("TORCHWCACHE_MODE", "off")
    plugin.register()
    assert not loading_process


def test_where_nothing_is_loaded_nothing_is_imported(loading_process: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.model_loader.loader")
    monkeypatch.setattr(hooks, "_resolve", lambda target: None)
    plugin.register()
    assert targets(loading_process) == [plugin.LOAD_PLUGINS], "nobody asked"
    loading_process.clear()
    monkeypatch.setenv("TORCHWCACHE_MODE", "client")
    stand_in(monkeypatch, "sglang.srt.managers.detokenizer_manager")
    plugin.register()
    assert not loading_process, "a detokenizer loads no models"
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.detokenizer_manager")
    plugin.register()
    assert {hooks.GET_LOADER, *guards.CALLER_GUARDS} <= set(targets(loading_process)), "a script that loads its plugins first"


def test_a_server_that_loads_plugins_before_all_else_gets_its_hooks_with_the_rest(
    loading_process: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sglang serve`` looks at its options, which may ask for the cache, after that."""
    loader = sys.modules["sglang.srt.model_loader.loader"]
    monkeypatch.delitem(sys.modules, "sglang.srt.model_loader.loader")
    monkeypatch.setattr(hooks, "_resolve", lambda target: None)
    plugin.register()
    ((_, asked_again, kind),) = loading_process
    loading_process.clear()
    assert kind == "after"
    assert asked_again(None) is None
    assert not loading_process, "there is nothing to hook yet"
    monkeypatch.setitem(sys.modules, "sglang.srt.model_loader.loader", loader)
    for _ in range(2):
        asked_again(None)
    assert len(set(targets(loading_process))) == len(loading_process)
    assert set(guards.CALLER_GUARDS) <= set(targets(loading_process))
    assert sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.applied == len(loading_process)


def test_what_cannot_be_hooked_later_does_not_stop_a_server(
    loading_process: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loader = sys.modules["sglang.srt.model_loader.loader"]
    monkeypatch.delitem(sys.modules, "sglang.srt.model_loader.loader")
    plugin.register()
    ((_, asked_again, _),) = loading_process
    monkeypatch.setitem(sys.modules, "sglang.srt.model_loader.loader", loader)
    monkeypatch.delattr(loader, "get_model_loader")
    asked_again(None)
    assert "torchwcache cannot be used with this SGLang" in caplog.text


@pytest.mark.parametrize("asked", ["by key", "by variable", "not at all", "off"])
def test_tokenizer_workers_get_guards_with_their_arguments(
    loading_process: list[Any], monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    extra = '{"torchwcache": {}}' if asked in ("by key", "off") else "{}"
    if asked != "not at all":
        monkeypatch.setenv("TORCHWCACHE_MODE", {"by key": "", "off": "off"}.get(asked, "client"))
    arguments = (1, types.SimpleNamespace(model_loader_extra_config=extra), {"max_req_input_len": 3})
    text = tokenizer_workers.around_write(lambda content, name: pickle.dumps(content), arguments, "a name")
    assert not loading_process
    assert pickle.loads(text) == arguments
    wanted = list(guards.CALLER_GUARDS) if asked in ("by key", "by variable") else []
    assert targets(loading_process) == wanted
    assert sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.applied == len(wanted)


def test_a_release_without_our_seam_is_said_loudly_or_stops(
    loading_process: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(sys.modules["sglang.srt.model_loader.loader"], "get_model_loader")
    with pytest.raises(LookupError, match=r"has no sglang\.srt\.model_loader\.loader\.get_model_loader"):
        plugin.register()
    assert not caplog.text, "nobody asked"
    monkeypatch.setenv("TORCHWCACHE_MODE", "daemon")
    with pytest.raises(LookupError):
        plugin.register()
    assert "torchwcache was asked for, but cannot be used with this SGLang" in caplog.text
    monkeypatch.setenv("TORCHWCACHE_FALLBACK", "error")
    with pytest.raises(SystemExit, match="torchwcache was asked for"):
        plugin.register()
    assert not loading_process


# ---- releases ----------------------------------------------------------------------------------------------------------------


def test_comments_and_blank_lines_do_not_make_another_loader() -> None:
    text = "def load(a):\n    # so\n\n    return a\n"
    assert seams.digest_of([("load", text)]) == seams.digest_of([("load", "    def load(a):\n        return a\n")])
    assert seams.digest_of([("load", text)]) != seams.digest_of([("load", text.replace("return a", "return -a"))])
    assert seams.digest_of([("load", text)]) != seams.digest_of([("other", text)])


@pytest.mark.parametrize(
    ("version", "warned"), [("0.5.17", False), ("0.5.23.post1", False), ("0.5.16", True), ("0.6.0rc1", True), ("", True)]
)
def test_releases_that_were_not_looked_at_are_warned_of(
    sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, warned: bool
) -> None:
    monkeypatch.setattr(seams, "installed_version", lambda: version)
    assert bool(seams.check()[0]) is warned
    assert not seams.check()[1]


def test_a_release_that_loads_in_another_way_is_not_published(
    sglang_loader: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DefaultModelLoader, "postprocess_weights", lambda self: None, raising=False)
    assert "is none that torchwcache knows" in seams.check()[1]
    monkeypatch.delattr(sglang_loader, "_initialize_model")
    assert "has no function _initialize_model" in seams.check()[1]


# ---- guards ------------------------------------------------------------------------------------------------------------------


class Answer:
    def __init__(self, *, success: bool, message: str) -> None:
        self.success, self.message = success, message


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = dict.fromkeys(guards._OUTPUTS.values(), Answer)
    empty = dict.fromkeys(guards._MEMORY_OUTPUTS.values(), lambda: "nothing done")
    stand_in(monkeypatch, "sglang.srt.managers.io_struct", **answers, **empty)
    stand_in(monkeypatch, "sglang.srt.constants", GPU_MEMORY_ALL_TYPES=["kv_cache", "weights", "cuda_graph"])
    monkeypatch.setattr(leases, "_shared", True)


def writes(*_: object) -> None:
    raise AssertionError("it was called")


def test_writes_are_refused_before_anything_is_written(shared: None) -> None:
    for name in guards._OUTPUTS:
        answer = guards.refusing(name)(writes, object(), object())
        assert not answer.success
        assert f"{name} is refused" in answer.message
    assert guards.refusing_in_updater("update_weights_from_disk")(writes, object(), "/model")[0] is False
    with pytest.raises(RuntimeError, match="is refused"):
        guards.refusing_in_updater("begin_weight_update")(writes, object())


MEMORY = [(name, guards.refusing_memory(name, output)) for name, output in guards._MEMORY_OUTPUTS.items()]


@pytest.mark.parametrize("tags", [None, [], ["weights"], ["weights", "kv_cache"]])
def test_a_scheduler_does_nothing_for_whoever_asks_for_weights(
    shared: None, caplog: pytest.LogCaptureFixture, tags: list[str] | None
) -> None:
    """Not the rest of it either: whoever asks is told that nothing was done, if not by the answer then by the log."""
    for name, hook in MEMORY:
        assert hook(writes, object(), types.SimpleNamespace(tags=tags)) == "nothing done"
        assert f"{name} is refused for 'weights'" in caplog.text


def test_memory_of_the_engines_own_is_released(shared: None) -> None:
    for _, hook in MEMORY:
        request = types.SimpleNamespace(tags=["kv_cache", "cuda_graph"])
        assert hook(lambda manager, asked: asked, object(), request) is request


class Manager:
    """As the engine's own process sees its schedulers: by what they answer."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.states = states

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return list(self.states)


async def released(manager: Manager, request: Any) -> object:
    return request.tags


def ask(manager: Manager, tags: list[str] | None) -> object:
    hook = guards.refusing_to_caller("release_memory_occupation")
    return asyncio.run(hook(released, manager, types.SimpleNamespace(tags=tags)))


def test_whoever_asks_for_memory_is_told_that_weights_are_not_the_engines_own(shared: None) -> None:
    state = guards.around_state(lambda scheduler, asked: types.SimpleNamespace(internal_state={}), object(), object())
    manager = Manager({}, state.internal_state)
    for tags in (None, [], ["weights"], ["weights", "kv_cache"]):
        with pytest.raises(RefusedError, match=r"Nothing was done. Ask with tags=\['kv_cache', 'cuda_graph'\] for the rest"):
            ask(manager, tags)
    assert ask(manager, ["kv_cache", "cuda_graph"]) == ["kv_cache", "cuda_graph"]
    assert ask(Manager({}, {}), None) is None


def test_the_checker_of_weights_does_not_write(shared: None) -> None:
    with pytest.raises(RuntimeError, match="reset_tensors is refused"):
        guards.around_check(writes, object(), "reset_tensors")
    assert guards.around_check(lambda checker, action: action, object(), "checksum") == "checksum"


def test_nothing_is_guarded_while_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_shared", False)
    request = types.SimpleNamespace(tags=None)
    for _, hook in MEMORY:
        assert hook(lambda manager, asked: asked, object(), request) is request
    assert guards.refusing("update_weights_from_disk")(lambda manager, asked: "done", object(), request) == "done"
    state = guards.around_state(lambda scheduler, asked: types.SimpleNamespace(internal_state={}), object(), object())
    assert state.internal_state == {}
    assert guards.around_check(lambda checker, action: action, object(), "reset_tensors") == "reset_tensors"
    assert guards.refusing_in_updater("update_weights_from_disk")(lambda updater: "done", object()) == "done"
