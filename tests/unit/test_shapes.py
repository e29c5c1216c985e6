"""What a build allocates is part of a model's identity."""

from __future__ import annotations

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
