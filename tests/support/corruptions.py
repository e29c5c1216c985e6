"""A module with something of everything, and every way to spoil it that a comparison must notice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["CORRUPTIONS", "Net"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.views = [self.a.weight.data[1:3], {"x": torch.arange(3)}]
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("rope", torch.ones(2), persistent=False)
        self.mode = "eager"
        self.config = {"layers": [1, 2]}
        self.act = nn.ReLU()
        self.lstm = nn.LSTM(2, 2)


def _swap(module: Net, new: torch.Tensor) -> None:
    module.a.weight = nn.Parameter(new)


CORRUPTIONS: dict[str, tuple[Callable[[Net], object], str]] = {
    "one bit": (lambda m: m.a.bias.data.view(torch.int32)[0].bitwise_xor_(1), "a.bias: values"),
    "negative zero": (lambda m: m.seen.neg_(), "seen: values"),
    "dtype": (lambda m: setattr(m, "seen", m.seen.double()), "seen: dtype"),
    "shape": (lambda m: setattr(m, "seen", torch.zeros(3)), "seen: shape"),
    "stride": (lambda m: setattr(m.a, "weight", nn.Parameter(m.a.weight.data.t().contiguous().t())), "a.weight: stride"),
    "kind": (lambda m: (delattr(m, "seen"), setattr(m, "seen", nn.Parameter(torch.zeros(2)))), "seen: class"),
    "tie broken": (lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data.clone())), "b.weight: is the same tensor as"),
    "tie broken, memory shared": (lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data)), "is the same tensor as"),
    "view broken": (lambda m: m.views.__setitem__(0, m.views[0].clone()), "views[0]: shares memory with"),
    "view moved": (lambda m: m.views.__setitem__(0, m.a.weight.data[0:2]), "views[0]"),
    "tensor missing": (lambda m: m.views[1].pop("x"), "views[1]['x']: tensor: expected a tensor, found nothing"),
    "tensor added": (lambda m: setattr(m, "more", torch.ones(1)), "more: tensor: expected nothing"),
    "persistence": (lambda m: m._non_persistent_buffers_set.clear(), "non-persistent buffers"),
    "order": (lambda m: m._buffers.update(seen=m._buffers.pop("seen")), "names in _buffers"),
    "attribute": (lambda m: setattr(m, "mode", "flash"), "mode: attribute"),
    "nested attribute": (lambda m: m.config["layers"].append(3), "config['layers']: attribute"),
    "attribute missing": (lambda m: delattr(m, "mode"), "mode: attribute"),
    "tensor attribute": (lambda m: setattr(m.a.weight, "is_shuffled", True), "is_shuffled"),
    "training": (lambda m: m.act.eval(), "act: training"),
    "class": (lambda m: setattr(m, "act", nn.GELU()), "act: state"),
    "module added": (lambda m: m.add_module("lora", nn.ReLU()), "lora: state"),
    "weak reference": (
        lambda m: m.lstm._flat_weights.__setitem__(0, m.lstm._flat_weights[0].detach().clone()),
        "lstm._flat_weights[0]",
    ),
}
