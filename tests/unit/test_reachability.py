"""Wherever a meta tensor hides, the last check before a module is served finds it."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.module import reachability
from torchwcache.module.reachability import BATCH, LastCheck, find_meta_tensors
from torchwcache.module.tree import Tree


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


class Slotted(nn.Module):
    __slots__ = ("kept",)


class Named(dict[str, Any]):
    """A dict of a class of its own, as a table of a module may be."""


_ANCHOR = Plain(None)
_KEPT: deque[Any] = deque(maxlen=1)


def _dict_of_an_object_that_lives(tensor: torch.Tensor) -> dict[str, Any]:
    _KEPT.append(Plain(tensor))
    return vars(_KEPT[0])


PLACES = {
    "itself": lambda tensor: tensor,
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
    "parameter's attribute": lambda tensor: _with_attribute(nn.Parameter(torch.zeros(1)), tensor),
    "module": lambda tensor: _with_attribute(nn.Module(), tensor),
    "module that is not registered": lambda tensor: [_with_attribute(nn.Linear(1, 1), tensor)],
    "dict key": lambda tensor: {tensor: 1},
    "class instance's dict": lambda tensor: vars(Plain(tensor)),
    "dict of an object that lives": _dict_of_an_object_that_lives,
    "generator": lambda tensor: (value for value in [tensor]),
    "what a weak reference calls": lambda tensor: weakref.ref(_ANCHOR, _closure(tensor)),
    "cycle": _cycle,
    "tables that refer to each other": _tables_that_refer_to_each_other,
}


@pytest.fixture(params=[False, True], ids=["as before 3.13", "as from 3.13 on"], autouse=True)
def where_values_lie(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves Python 3.13 is right on any Python; the other way serves only older ones."""
    if sys.version_info >= (3, 13) and not request.param:
        pytest.skip("here, the collector does not list what an object's dict holds")
    monkeypatch.setattr(reachability, "_VALUES_IN_OBJECTS", request.param)


def both(root: nn.Module) -> bool:
    """The two ways to ask must agree; the fast one knows the tensors that the tables of the tree hold and that are not on meta."""
    fast = LastCheck(Tree(root))  # first: the other one makes places for attributes by asking for them
    for modules in _batches(root):
        fast.add([module.__dict__ for module in modules], [obj for module in modules for obj in _contents(module)])
    found = fast.finds_meta()
    assert bool(find_meta_tensors(root)) is found
    return found


def _batches(root: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules of each class, some at a time."""
    by_class: dict[type, list[nn.Module]] = {}
    for module in root.modules():
        by_class.setdefault(type(module), []).append(module)
    for modules in by_class.values():
        for start in range(0, len(modules), BATCH):
            yield modules[start : start + BATCH]


def _contents(module: nn.Module) -> list[Any]:
    """What is in the tables of a module; a tensor that may lead to another is not known to be in any."""
    tensors = [*module._parameters.values(), *module._buffers.values()]
    bare = [None if tensor is None or tensor.is_meta or tensor.__dict__ else tensor for tensor in tensors]
    return [*bare, *module._modules.values()]


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found(place: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].__dict__["hidden"] = PLACES[place](torch.empty(1, device="meta"))
    assert both(module)


@pytest.mark.parametrize("place", PLACES)
def test_a_real_one_in_the_same_place_is_none(place: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].__dict__["hidden"] = PLACES[place](torch.zeros(1))
    assert not both(module)


@pytest.mark.parametrize("name", sorted(nn.Linear(1, 1).__dict__))
@pytest.mark.parametrize("table", [OrderedDict, Named])
def test_what_every_module_has_is_no_hiding_place(name: str, table: type[Any]) -> None:
    for device in ("meta", "cpu"):
        module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(200)))
        before = module[150].__dict__[name]
        module[150].__dict__[name] = table(before if isinstance(before, dict) else {})
        module[150].__dict__[name].kept = torch.zeros(1, device=device)
        assert both(module) is (device == "meta")


@pytest.mark.parametrize("attributes", [1, 8, 16, 64])
def test_however_much_a_module_holds(attributes: int) -> None:
    for device in ("meta", "cpu"):
        module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
        for number in range(attributes):
            setattr(module[1], f"attribute_{number}", [torch.zeros(1, device=device)] if number == attributes - 1 else number)
        assert both(module) is (device == "meta")


def test_a_key_of_a_modules_own_dict_is_found() -> None:
    for device in ("meta", "cpu"):
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        vars(module[1])[torch.zeros(1, device=device)] = 1
        assert both(module) is (device == "meta")


@pytest.mark.parametrize("name", ["weight", "bias", "buffer"])
def test_a_parameter_or_buffer_is_found(name: str) -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    module[1].register_buffer("buffer", torch.zeros(1))
    assert not both(module)
    module[1].get_parameter("weight").kept = torch.zeros(1)  # type: ignore[attr-defined]
    assert not both(module)
    table = module[1]._buffers if name == "buffer" else module[1]._parameters
    table[name] = nn.Parameter(torch.zeros(1, device="meta"))
    assert find_meta_tensors(module) == [f"1.{name}"]
    assert both(module)


def test_a_module_with_slots() -> None:
    for device in ("meta", "cpu"):
        module = nn.Sequential(nn.Linear(1, 1), Slotted(), Slotted())
        module[2].kept = torch.zeros(1, device=device)
        assert "kept" not in module[2].__dict__
        assert both(module) is (device == "meta")


def test_what_is_referred_to_weakly_does_not_count() -> None:
    tensor = torch.empty(1, device="meta")
    module = nn.Linear(2, 2)
    module.__dict__["hidden"] = weakref.ref(tensor)
    assert not both(module)
