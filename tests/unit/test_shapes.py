"""What a build allocates is part of a model's identity."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from torchwcache.module.shapes import shapes_digest


class Indexer(nn.Module):
    """Holds what it works in as a plain attribute, as vLLM's sparse attention does: as large as an option says."""

    def __init__(self, tokens: int, put: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.found = put(torch.empty(tokens, 4, dtype=torch.int32))


def test_names_shapes_and_dtypes_count_and_devices_and_values_do_not() -> None:
    assert shapes_digest(nn.Linear(2, 2)) == shapes_digest(nn.Linear(2, 2, device="meta"))
    others = [nn.Linear(2, 3), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, dtype=torch.float16), nn.Sequential(nn.Linear(2, 2))]
    assert len({shapes_digest(module) for module in (nn.Linear(2, 2), *others)}) == 5


class Kernel:
    """No module, as the attention that a layer of vLLM's calls."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffers = {"found": (None, buffer)}
        self.again = self


class Slotted:
    __slots__ = ("buffer", "empty")

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer


@pytest.mark.parametrize(
    "put",
    [
        lambda tensor: tensor,
        lambda tensor: [None, tensor],
        lambda tensor: {"buffer": tensor, "n": 1},
        lambda tensor: [[(tensor,)]],
        lambda tensor: OrderedDict(buffer={"a": tensor}),
        lambda tensor: {object(): tensor},
        lambda tensor: partial(print, tensor),
        Kernel,
        Slotted,
    ],
)
def test_tensors_that_are_plain_attributes_count(put: Callable[[torch.Tensor], object]) -> None:
    assert shapes_digest(Indexer(8, put)) == shapes_digest(Indexer(8, put))
    assert shapes_digest(Indexer(8, put)) != shapes_digest(Indexer(16, put))


@pytest.mark.parametrize(
    "put",
    [
        lambda module: [module],
        lambda module: {"a": (None, [module])},
        lambda module: OrderedDict({object(): module}),
        lambda module: (nn.ModuleList([module]),),
    ],
)
def test_modules_that_are_not_registered_count(put: Callable[[nn.Module], object]) -> None:
    def build(tokens: int) -> nn.Module:
        module = nn.Linear(2, 2)
        inside = nn.Module()
        inside.register_buffer("found", torch.empty(tokens))
        inside.__dict__["outside"] = [module]  # and there it comes round again
        module.hidden = put(inside)
        return module

    assert shapes_digest(build(8)) == shapes_digest(build(8))
    assert shapes_digest(build(8)) != shapes_digest(build(16))
    held = nn.Linear(2, 2)
    held.hidden = put(Indexer(8, lambda tensor: tensor))
    wider = nn.Linear(2, 2)
    wider.hidden = put(Indexer(16, lambda tensor: tensor))
    assert shapes_digest(held) != shapes_digest(wider)


def test_a_list_that_contains_itself_ends() -> None:
    module = nn.Linear(2, 2)
    endless: list[object] = [nn.Linear(2, 2)]
    endless.append(endless)
    module.endless = endless  # type: ignore[assignment]
    assert shapes_digest(module) == shapes_digest(module)


def test_a_list_of_modules_that_are_registered_changes_nothing() -> None:
    plain, listed = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    listed.layers = list(listed)  # type: ignore[assignment]
    listed[0].__dict__["parent"] = listed
    assert shapes_digest(plain) == shapes_digest(listed)


def shape_of(buffer: torch.Tensor, *_: object) -> None:
    """A hook, with a tensor of its own."""


def hooked(tokens: int) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(partial(shape_of, torch.empty(tokens)))
    return module


class CompiledOnDemand:
    """As a Triton kernel is: it keeps the globals of its function."""

    def __init__(self) -> None:
        self.__globals__ = GLOBALS


GLOBALS: dict[str, object] = {"torch": torch}


def holding(value: object) -> nn.Module:
    module = nn.Linear(2, 2)
    module.held = value
    return module


def test_the_same_build_has_the_same_digest_whatever_happened_in_its_process() -> None:
    assert shapes_digest(hooked(8)) == shapes_digest(hooked(8)), "hooks are counted by the process"
    assert shapes_digest(hooked(8)) != shapes_digest(hooked(16))
    one, other = object(), object()
    assert shapes_digest(holding({id(one): torch.empty(2)})) == shapes_digest(holding({id(other): torch.empty(2)}))
    before = shapes_digest(holding(CompiledOnDemand()))
    GLOBALS["workspace"] = torch.empty(8)
    assert shapes_digest(holding(CompiledOnDemand())) == before


def test_what_lay_too_deep_the_first_time_counts_where_it_does_not() -> None:
    def deep(tokens: int) -> nn.Module:
        held: list[object] = [[torch.empty(tokens)]]
        around = held
        for _ in range(8):
            around = [around]
        module = holding(around)
        module.again = held
        return module

    assert shapes_digest(deep(8)) != shapes_digest(deep(16))


def test_a_proxy_of_something_gone_holds_nothing() -> None:
    gone = nn.Linear(2, 2)
    proxy = weakref.proxy(gone)
    del gone
    assert shapes_digest(holding([proxy])) == shapes_digest(holding([]))


class Lazy(Slotted):
    """Makes what it holds when it is asked for."""

    @property
    def buffer(self) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("there is no GPU to make it on")

    @buffer.setter
    def buffer(self, buffer: torch.Tensor) -> None:
        Slotted.buffer.__set__(self, buffer)


def test_properties_are_not_asked_for() -> None:
    assert shapes_digest(holding(Lazy(torch.empty(2)))) == shapes_digest(holding(Slotted(torch.empty(2))))
    assert shapes_digest(holding(Lazy(torch.empty(2)))) != shapes_digest(holding(Lazy(torch.empty(3))))
