"""Building without weights: ties, views, what was computed, and constructors that need real values (D10)."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from torchwcache.config import ModelConfig
from torchwcache.errors import BuildError, ConfigError
from torchwcache.module.construct import (
    build_for_real,
    build_on_meta,
    build_parameters_on_meta,
    materialize,
    parameters_on_meta,
    resolve_callable,
)


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(width, width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embed.weight
        shared = nn.Parameter(torch.ones(2))
        self.one, self.two = shared, shared
        self.top = self.head.weight[:2]
        self.detached = [self.head.weight.data.t()]
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 5), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", self.weight.detach() * 2, persistent=False)


class ReadsItsOwnTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
        self.weight = nn.Parameter(torch.ones(3))


class ReadsItsParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.total = float(self.weight.sum())


def config(build: object, **kwargs: object) -> ModelConfig:
    return ModelConfig("unused", build=build, **kwargs)  # type: ignore[arg-type]


def allocate(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_parameters_on_meta_keeps_ties_and_real_buffers() -> None:
    module = build_parameters_on_meta(config(Tied))
    assert all(p.is_meta for p in module.parameters())
    assert module.head.weight is module.embed.weight
    assert module.one is module.two
    assert torch.equal(module.inv_freq, 1.0 / torch.arange(1, 5))
    assert nn.Module.register_parameter.__qualname__ == "Module.register_parameter"  # the patch is gone


def test_attributes_that_a_parameter_gets_after_it_was_registered() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.empty(2))
            weight.early = 1  # type: ignore[attr-defined]
            self.register_parameter("weight", weight)
            weight.loader = self.load  # type: ignore[attr-defined]

        def load(self) -> None: ...

    module = build_parameters_on_meta(config(Late))
    assert module.weight.is_meta
    assert module.weight.early == 1
    assert module.weight.loader == module.load


def test_a_parameter_whose_id_is_reused_is_not_mistaken_for_a_tie() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i in range(200):
                setattr(self, f"p{i}", nn.Parameter(torch.empty(1)))

    module = build_parameters_on_meta(config(Many))
    assert len({id(p) for p in module.parameters()}) == 200


def test_materialize_gives_ties_and_views_one_memory() -> None:
    sizes: list[int] = []
    module = build_parameters_on_meta(config(Tied))
    assert materialize(module, allocate, sizes.extend) == []
    assert sorted(sizes) == [8, 64]
    assert module.head.weight is module.embed.weight
    assert isinstance(module.head.weight, nn.Parameter)
    with torch.no_grad():
        module.embed.weight.copy_(torch.arange(16.0).view(4, 4))
    assert torch.equal(module.top, module.head.weight[:2])
    assert module.detached[0].data_ptr() == module.embed.weight.data_ptr()


def test_what_was_computed_from_a_parameter_is_named_and_nothing_is_changed() -> None:
    module = build_parameters_on_meta(config(Computed))
    assert materialize(module, allocate) == ["scale"]
    assert module.weight.is_meta


def test_dtype_is_the_modules_own_unless_asked_for() -> None:
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float16)):
        for build in (build_on_meta, build_parameters_on_meta, build_for_real):
            module = build(config(Tied, dtype=dtype))
            assert module.embed.weight.dtype is module.inv_freq.dtype is expected
            assert module.mask.dtype is torch.bool


def test_a_constructor_that_reads_its_own_tensors() -> None:
    with pytest.raises(BuildError, match="build_meta"):
        build_on_meta(config(ReadsItsOwnTensors))
    assert build_parameters_on_meta(config(ReadsItsOwnTensors)).rates == [0.0, 0.5, 1.0]


def test_a_constructor_that_reads_its_parameters() -> None:
    cfg = config(ReadsItsParameters)
    for build in (build_on_meta, build_parameters_on_meta):
        with pytest.raises(BuildError, match="ReadsItsParameters cannot be built") as caught:
            build(cfg)
        assert caught.value.__cause__ is not None
    assert build_for_real(cfg).total == 3.0

    def without_values() -> nn.Module:
        module = nn.Module()
        module.__class__ = ReadsItsParameters
        module.weight = nn.Parameter(torch.ones(3))
        return module

    assert build_on_meta(config(ReadsItsParameters, build_meta=without_values)).weight.is_meta


def test_building_does_not_disturb_the_random_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    build_on_meta(config(Tied))
    build_parameters_on_meta(config(Tied))
    assert torch.equal(torch.rand(1), expected)


def test_a_seed_makes_a_full_build_repeatable() -> None:
    cfg = config(Tied, seed=5)
    assert torch.equal(build_for_real(cfg).embed.weight, build_for_real(cfg).embed.weight)


@pytest.mark.parametrize(
    ("build", "message"),
    [("no.such.module:X", "cannot be imported"), ("math:nothing", "cannot be imported"), ("math:pi", "not a class or a callable")],
)
def test_a_name_that_leads_nowhere(build: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_callable(build)


def test_a_name_that_leads_somewhere() -> None:
    assert resolve_callable("torch.nn:Linear") is nn.Linear
    assert resolve_callable("torch:nn.Linear") is nn.Linear


def test_a_build_that_makes_no_module() -> None:
    with pytest.raises(BuildError, match=r"not a torch\.nn\.Module"):
        build_on_meta(config(lambda: 5))


@pytest.mark.parametrize("text", ["plain", ":x", "x:", 5, object()])
def test_a_build_that_is_neither_callable_nor_a_name(text: object) -> None:
    with pytest.raises(ConfigError):
        config(text)


def test_threads_that_build_without_parameters_leave_the_rest_of_the_process_alone() -> None:
    before = nn.Module.register_parameter
    first_is_inside, second_is_inside, first_has_left = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with parameters_on_meta():
            first_is_inside.set()
            second_is_inside.wait(10)
        first_has_left.set()

    def second() -> None:
        first_is_inside.wait(10)
        with parameters_on_meta():
            second_is_inside.set()
            first_has_left.wait(10)
            assert nn.Linear(1, 1).weight.is_meta

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(first), pool.submit(second)]
        first_is_inside.wait(10)
        assert not nn.Linear(1, 1).weight.is_meta  # built here meanwhile, by a thread that asked for nothing
        for future in futures:
            future.result()
    assert nn.Module.register_parameter is before
    assert not nn.Linear(1, 1).weight.is_meta


def test_leaving_after_somebody_else_has_wrapped_the_method_keeps_theirs_and_no_loop() -> None:
    before = nn.Module.register_parameter
    try:
        with parameters_on_meta():
            ours = nn.Module.register_parameter
            nn.Module.register_parameter = lambda self, name, param: ours(self, name, param)  # type: ignore[method-assign]
        assert not nn.Linear(1, 1).weight.is_meta
        with parameters_on_meta():
            assert nn.Linear(1, 1).weight.is_meta
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]


class KeepsItsList(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes


def test_each_build_gets_containers_of_its_own() -> None:
    given = ModelConfig("nowhere", build=KeepsItsList, build_kwargs={"sizes": [1, 2]})
    first, second = build_on_meta(given), build_parameters_on_meta(given)
    first.sizes.append(3)  # type: ignore[union-attr, operator]
    assert second.sizes == [1, 2]
    assert build_on_meta(given).sizes == [1, 2]


@pytest.mark.parametrize(("kwargs", "message"), [({}, "missing a required argument"), ({"width": 1, "depth": 2}, "unexpected")])
def test_arguments_that_do_not_fit_the_build(kwargs: dict[str, int], message: str) -> None:
    def build(width: int) -> nn.Module:
        return nn.Linear(width, width)

    for make in (build_on_meta, build_parameters_on_meta, build_for_real):
        with pytest.raises(ConfigError, match=message):
            make(config(build, build_kwargs=kwargs))


def test_building_without_weights_does_not_import_the_compiler() -> None:
    script = """
import sys
from torch import nn
from torchwcache.config import ModelConfig
from torchwcache.module.construct import build_on_meta, build_parameters_on_meta
cfg = ModelConfig("unused", build=nn.Embedding, build_kwargs={"num_embeddings": 4, "embedding_dim": 2})
before = set(sys.modules)
build_on_meta(cfg), build_parameters_on_meta(cfg)
print("torch._dynamo" in set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
