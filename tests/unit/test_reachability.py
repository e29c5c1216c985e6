"""Wherever a meta tensor hides, the last check before a module is served finds it."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.module.reachability import find_meta_tensors


class Table(OrderedDict[str, Any]):
    """An OrderedDict of a class of its own."""


class Slots:
    __slots__ = ("kept",)


@dataclass(eq=False)
class Plain:
    kept: Any


def _with_attribute(obj: Any, tensor: torch.Tensor) -> Any:
    obj.kept = tensor
    return obj


def _slots(tensor: torch.Tensor) -> Slots:
    return _with_attribute(Slots(), tensor)


def _closure(tensor: torch.Tensor) -> Any:
    return lambda: tensor


def _default(tensor: torch.Tensor) -> Any:
    def function(value: torch.Tensor = tensor) -> None: ...

    return function


def _keyword_default(tensor: torch.Tensor) -> Any:
    def function(*, value: torch.Tensor = tensor) -> None: ...

    return function


def _cycle(tensor: torch.Tensor) -> list[Any]:
    items: list[Any] = [OrderedDict()]
    items += [items, {"itself": items}, OrderedDict(itself=items), tensor]
    return items


def _tables_that_refer_to_each_other(tensor: torch.Tensor) -> OrderedDict[str, Any]:
    first: Any = OrderedDict()
    first.other = OrderedDict()
    first.other.other = first
    first.other.kept = tensor
    return first  # type: ignore[no-any-return]


PLACES = {
    "list": lambda tensor: [tensor],
    "tuple": lambda tensor: ((), (tensor,)),
    "dict": lambda tensor: {"a": {}, "b": {"c": tensor}},
    "set": lambda tensor: {tensor},
    "frozenset": lambda tensor: frozenset({tensor}),
    "deque": lambda tensor: deque([tensor]),
    "ordered dict": lambda tensor: OrderedDict(a=tensor),
    "attribute of an empty ordered dict": lambda tensor: _with_attribute(OrderedDict(), tensor),
    "attribute of an empty dict's subclass": lambda tensor: _with_attribute(Table(), tensor),
    "object": Plain,
    "namespace": lambda tensor: types.SimpleNamespace(kept=tensor),
    "slot": _slots,
    "closure": _closure,
    "default": _default,
    "keyword default": _keyword_default,
    "function attribute": lambda tensor: _with_attribute(_closure(torch.zeros(1)), tensor),
    "partial": lambda tensor: functools.partial(print, tensor),
    "bound method": lambda tensor: Plain(tensor).__repr__,
    "iterator": lambda tensor: iter([tensor]),
    "tensor attribute": lambda tensor: _with_attribute(torch.zeros(1), tensor),
    "parameter": nn.Parameter,
    "module": lambda tensor: _with_attribute(nn.Module(), tensor),
    "cycle": _cycle,
    "tables that refer to each other": _tables_that_refer_to_each_other,
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found(place: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].__dict__["hidden"] = PLACES[place](torch.empty(1, device="meta"))
    assert find_meta_tensors(module)


@pytest.mark.parametrize("place", PLACES)
def test_a_real_one_in_the_same_place_is_none(place: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].__dict__["hidden"] = PLACES[place](torch.zeros(1))
    assert find_meta_tensors(module) == []


def test_what_is_referred_to_weakly_does_not_count() -> None:
    tensor = torch.empty(1, device="meta")
    module = nn.Linear(2, 2)
    module.__dict__["hidden"] = weakref.ref(tensor)
    assert find_meta_tensors(module) == []
