"""After a close every use of the module says so, and tensors that were kept stay what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchwcache.errors import DetachedError
from torchwcache.module.detach import detach


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.lstm = nn.LSTM(2, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.table = {"rope": [torch.ones(2)]}
        self.bound = lambda x, w=self.lin.weight: x @ w

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


USES: dict[str, Callable[[Net], object]] = {
    "forward": lambda m: m(torch.ones(2)),
    "submodule": lambda m: m.lin(torch.ones(2)),
    "lstm": lambda m: m.lstm(torch.ones(1, 1, 2)),
    "state_dict": lambda m: m.state_dict(),
    "arithmetic": lambda m: m.lin.weight + 1,
    "shape": lambda m: m.lin.weight.shape,
    "in place": lambda m: m.seen.add_(1),
    "to": lambda m: m.to(torch.float64),
    "attribute": lambda m: m.table["rope"][0].sum(),
    "closure": lambda m: m.bound(torch.ones(2)),
    "numpy": lambda m: m.seen.numpy(),
    "item": lambda m: float(m.seen),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_raises(use: str) -> None:
    module = Net()
    detach(module)
    with pytest.raises(DetachedError, match="attachment was closed"):
        USES[use](module)


def test_kept_tensors_stay_and_printing_works() -> None:
    module = Net()
    kept, view = module.lin.weight, module.lin.weight[0]
    expected = kept.detach().clone()
    detach(module)
    assert torch.equal(kept, expected)
    assert torch.equal(view, expected[0])
    assert "Linear" in repr(module)
    assert repr(module.lin.weight) == "DetachedTensor()"


def test_detaching_twice_is_fine() -> None:
    module = Net()
    detach(module)
    detach(module)
