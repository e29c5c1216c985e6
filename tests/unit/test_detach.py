"""After a close every use of the module says so, and tensors that were kept stay what they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchwcache.attachment import Attachment, AttachReport
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
        self.norm = self.lin.weight.norm

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
    "method": lambda m: m.norm(),
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


class Recorder:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.other = nn.Linear(2, 2)

    def hook(self, _module: nn.Module, _args: object, output: torch.Tensor) -> None:
        self.seen.append(output)


def test_what_a_hook_or_a_shared_object_leads_to_is_left_alone() -> None:
    module, recorder, shared = Net(), Recorder(), {"rope": torch.ones(2)}
    attachment = Attachment(module, AttachReport())
    recorded: list[torch.Tensor] = []
    module.lin.register_forward_hook(recorder.hook)
    module.lin.register_forward_hook(lambda m, _args, output: recorded.extend((m.weight, output)))
    module.cache = shared
    module(torch.ones(2))
    attachment.close()
    assert recorder.other(torch.ones(2)).shape == (2,)
    assert torch.equal(recorder.seen[0], recorded[1])
    assert recorded[0].sum().isfinite()
    assert shared["rope"].sum() == 2
    for use in USES.values():
        with pytest.raises(DetachedError):
            use(module)
