"""What the watch is told by an engine; ``test_sglang_unwritten.py`` has what it finds by itself."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.module import unwritten
from torchwcache.module.unwritten import UNSEEN, watched

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


class Padded(nn.Module):
    """Three experts, each with 4 more rows and columns than a checkpoint has."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 36, 36, dtype=dtype), requires_grad=False)

    def read(self, experts: Sequence[int]) -> None:
        for expert in experts:
            self.weight.data[expert, :32, :32].copy_(torch.full((32, 32), 0.5))


def filled(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    weight: Any = model.weight
    return {"weight": [weight.detach()[:, :16, :32], weight.detach()[:, 16:32, :32]]}


def load(dtype: torch.dtype, experts: Sequence[int], **options: Any) -> tuple[Any, tuple[str, ...]]:
    build: Callable[[], Any] = lambda: Padded(dtype)  # noqa: E731
    engine = types.SimpleNamespace(make=build)
    with watched(engine, "make", load="read", **options) as watch:
        model = engine.make()
        model.read(experts)
    assert engine.make is build
    assert "read" not in model.__dict__
    return model, watch.names


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_has_zeros_and_is_no_weight_when_the_engine_says_so(dtype: torch.dtype) -> None:
    model, names = load(dtype, range(3), parts=filled)
    assert names == ()
    assert model.weight.float().sum().item() == 3 * 32 * 32 * 0.5
    _, names = load(dtype, range(3))
    assert names == ("weight",)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_that_is_missing_beside_padding_is_found(dtype: torch.dtype) -> None:
    model, names = load(dtype, (0, 2), parts=filled)
    assert names == ("weight",)
    assert model.weight.float().sum().item() == 2 * 32 * 32 * 0.5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int16])
def test_in_a_narrow_dtype_a_column_says_something_when_it_is_long(dtype: torch.dtype) -> None:
    class Wide(nn.Module):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(rows, 20, dtype=dtype), requires_grad=False)

        def read(self) -> None:
            self.weight.data[:, :19].copy_(torch.ones(19))

    for rows, expected in ((16, ("weight",)), (15, ())):
        engine = types.SimpleNamespace(make=Wide)
        with watched(engine, "make", load="read") as watch:
            engine.make(rows).read()
        assert watch.names == expected


@pytest.mark.parametrize("step", ["_fill", "_weights", "_is_unwritten"])
def test_a_watch_that_fails_is_no_failure_of_the_load(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(unwritten._Building if step == "_fill" else unwritten, step, fail)
    model, names = load(torch.float32, range(3), parts=filled)
    assert names == (UNSEEN,)
    assert torch.equal(model.weight[:, :32, :32], torch.full((3, 32, 32), 0.5))
