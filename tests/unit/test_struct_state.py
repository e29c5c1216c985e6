"""msgspec Structs are written in C, but everything that they hold is in slots: they are walked like any other object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from support.roundtrip import roundtrip
from torch import nn

from torchwcache.errors import CaptureError


class Path(msgspec.Struct, frozen=True):
    entry: Any
    output: Any = None


class Longer(Path, frozen=True):
    more: int = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.plan = {"ordinary": Longer(entry=self.forward, output=[self.lin])}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


def test_an_unchanged_struct_stays_and_points_into_the_new_module() -> None:
    attached = roundtrip(Net(), Net)
    path = attached.plan["ordinary"]
    assert path.entry.__self__ is attached
    assert path.output[0] is attached.lin


def test_what_a_load_put_into_a_frozen_struct_is_carried() -> None:
    loaded = Net()
    value = torch.arange(3.0)
    for name, item in (("more", 5), ("entry", value)):
        owner = Longer if name == "more" else Path
        owner.__dict__[name].__set__(loaded.plan["ordinary"], item)
    attached = roundtrip(loaded, Net)
    assert attached.plan["ordinary"].more == 5
    assert torch.equal(attached.plan["ordinary"].entry, value)


@pytest.mark.parametrize("change", [object, lambda: lambda x: x])
def test_what_cannot_be_carried_in_a_struct_is_refused(change: Callable[[], object]) -> None:
    loaded = Net()
    Path.__dict__["output"].__set__(loaded.plan["ordinary"], change())
    with pytest.raises(CaptureError, match=r"plan\['ordinary'\]\.output"):
        roundtrip(loaded, Net)
