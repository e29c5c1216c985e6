"""Which weights a load never wrote, on models of a few elements: stand-ins for SGLang's loader build and load them."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.adapter import LoadResult
from torchwcache.config import ModelConfig
from torchwcache.errors import NotAFunctionOfCheckpointError
from torchwcache.production import check_publishable
from torchwcache_sglang.unwritten import UNSEEN, given_by_target, watched


class Model(nn.Module):
    """As SGLang's models: fused and stacked weights without values, norms of ones, scratch memory."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(6, 4, dtype=dtype), requires_grad=False)
        self.fused = nn.Parameter(torch.empty(3, 4, 16, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(-1.0), requires_grad=False)
        self.register_buffer("rope", torch.arange(4.0), persistent=False)
        self.register_buffer("workspace", torch.empty(8), persistent=False)
        self.scratch = torch.empty(5)

    def load_weights(self, weights: Callable[[Model], None]) -> str:
        weights(self)
        return "done"


def complete(model: Model) -> None:
    model.embed.data.copy_(torch.full((6, 4), 0.5))
    for expert in range(3):
        model.fused.data[expert].copy_(torch.full((4, 16), 0.25))


def load(build: Callable[[], Any], write: Callable[[Any], None]) -> tuple[Any, tuple[str, ...]]:
    """As SGLang's loader does it: by the name in its module, then by the model's method."""
    loader = types.SimpleNamespace(_initialize_model=build)
    with watched(loader) as watch:
        model = loader._initialize_model()
        model.load_weights(write)
    assert loader._initialize_model is build
    assert "load_weights" not in model.__dict__
    return model, watch.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int32])
def test_what_was_written_in_full_is_fine(dtype: torch.dtype) -> None:
    model, names = load(lambda: Model(dtype), complete)
    assert names == ()
    assert model.scratch.tolist() == [0.0] * 5
    assert model.workspace.tolist() == [0.0] * 8
    assert model.norm.tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int32])
def test_one_part_that_was_not_written_is_found(dtype: torch.dtype) -> None:
    def incomplete(model: Model) -> None:
        untouched = model.fused.data[1].clone()
        complete(model)
        model.fused.data[1].copy_(untouched)

    model, names = load(lambda: Model(dtype), incomplete)
    assert names == ("fused",)
    assert model.fused[1].float().tolist() == [[0.0] * 16] * 4
    assert model.fused[0].float().tolist() == [[float(torch.tensor(0.25).to(dtype))] * 16] * 4


def test_several_are_named_each_and_none_is_published() -> None:
    model, names = load(Model, lambda model: None)
    assert names == ("embed", "fused")
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())
    with pytest.raises(NotAFunctionOfCheckpointError, match=r"left 2 of the model's tensors.*embed, fused\. See"):
        check_publishable(ModelConfig("m", seed=1), LoadResult(module=model, unwritten=names), "none")


def test_a_checkpoints_own_nan_is_a_value() -> None:
    def write(model: Model) -> None:
        complete(model)
        model.embed.data[0] = torch.nan

    assert load(Model, write)[1] == ()


def test_who_writes_does_not_matter() -> None:
    def write(model: Model) -> None:
        worker = threading.Thread(target=complete, args=(model,))
        worker.start()
        worker.join()

    assert load(Model, write)[1] == ()
    assert load(Model, lambda model: (complete(model), setattr(model.embed, "data", torch.zeros(6, 4))))[1] == ()


def test_tied_weights_are_one() -> None:
    class Tied(Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Module()
            self.head.weight = self.embed

    assert load(Tied, complete)[1] == ()
    assert load(Tied, lambda model: model.fused.data.zero_())[1] == ("embed",)


class Random(Model):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.randn(4) * 0.02)
        nn.init.zeros_(self.linear.bias)
        self.noise = torch.randn(4)

    def write(self) -> None:
        complete(self)
        self.linear.weight.data.copy_(torch.eye(4))
        self.token.data.fill_(1)


def test_random_values_are_no_weights_and_stay_those_that_were_drawn() -> None:
    assert load(Random, Random.write)[1] == ()
    torch.manual_seed(3)
    expected, after = Random(), torch.rand(1)
    torch.manual_seed(3)
    model, names = load(Random, complete)
    assert torch.equal(torch.rand(1), after)
    assert sorted(names) == ["linear.weight", "token"]
    assert torch.equal(model.linear.weight, expected.linear.weight)
    assert torch.equal(model.token, expected.token)
    assert torch.equal(model.noise, expected.noise)
    assert model.linear.bias.tolist() == [0.0] * 4


def test_buffers_of_the_state_dict_count() -> None:
    class Buffered(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.empty(4))

    assert load(Buffered, complete)[1] == ("mean",)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.float8_e4m3fn])
def test_narrow_dtypes_have_the_pattern_among_their_values(dtype: torch.dtype) -> None:
    """A whole row of it says something; single values of it are values, also where a table or the rest of a weight has them."""
    pattern = torch.full((1,), 0x7FEA if dtype.itemsize == 2 else 0x7F, dtype=torch.int16)
    raw = (pattern if dtype.itemsize == 2 else pattern.to(torch.uint8)).view(dtype)
    values = torch.zeros(2, 32, dtype=torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)
    values[0, 5] = values[1, 7] = raw[0]

    class Quantized(Model):
        def __init__(self) -> None:
            super().__init__()
            self.packed = nn.Parameter(torch.empty(2, 32, dtype=dtype), requires_grad=False)
            self.short = nn.Parameter(torch.empty(3, dtype=dtype), requires_grad=False)
            self.table = torch.empty(32, dtype=dtype)
            self.table.copy_(values[0])
            self.unused = torch.empty(32, dtype=dtype)

    def write(model: Any) -> None:
        complete(model)
        model.packed.data.copy_(values)
        model.short.data.copy_(raw.expand(3))

    def half(model: Any) -> None:
        complete(model)
        model.packed.data[0].copy_(values[0])

    def bits(tensor: torch.Tensor) -> list[int]:
        return tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16).tolist()

    model, names = load(Quantized, write)
    assert names == ()
    assert (bits(model.packed), bits(model.table)) == (bits(values), bits(values[0]))
    assert bits(model.unused) == [0] * 32
    model, names = load(Quantized, half)
    assert names == ("packed",)
    assert bits(model.packed) == [bits(values[0]), [0] * 32]


def test_a_scale_of_block_fp8_that_sglang_left_unset() -> None:
    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.weight_scale_inv = nn.Parameter(torch.empty(2, 2), requires_grad=False)
            self.weight_scale_inv.data[:] = torch.finfo(torch.float32).min

    assert load(Scaled, complete)[1] == ("weight_scale_inv",)
    assert load(Scaled, lambda model: (complete(model), model.weight_scale_inv.data.fill_(0.1)))[1] == ()


def test_a_load_that_went_elsewhere_is_not_taken_for_a_complete_one() -> None:
    loader = types.SimpleNamespace(_initialize_model=Model)
    with watched(loader) as watch:
        complete(Model())
    assert watch.names == (UNSEEN,)
    with watched(loader) as watch:
        complete(loader._initialize_model())
    assert watch.names == (UNSEEN,)


def test_a_load_that_fails_leaves_nothing_behind() -> None:
    def write(model: Model) -> None:
        raise RuntimeError("no")

    loader = types.SimpleNamespace(_initialize_model=Model)
    models = []

    def fail() -> None:
        with watched(loader):
            models.append(loader._initialize_model())
            models[0].load_weights(write)

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert loader._initialize_model is Model
    assert "load_weights" not in models[0].__dict__


class Draft(Model):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.empty(6, 4), requires_grad=False)
        self.config = types.SimpleNamespace(hidden_size=4, **config)

    def get_embed_and_head(self) -> tuple[Any, Any]:
        return self.embed, self.head


def test_what_a_draft_gets_from_its_target() -> None:
    draft = Draft()
    assert given_by_target(draft, "EAGLE") == {"embed", "head"}
    assert given_by_target(draft, "EAGLE3") == {"embed"}
    assert given_by_target(Draft(target_hidden_size=8), "EAGLE3") == frozenset()
    draft.load_lm_head_from_target = True
    assert given_by_target(draft, "EAGLE3") == {"embed", "head"}
    assert given_by_target(draft, "STANDALONE") == given_by_target(draft, "None") == frozenset()
    assert given_by_target(Model(), "EAGLE") == frozenset()
