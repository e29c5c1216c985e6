"""Plain modules for tests on a GPU, and checkpoints for them. Imported by workers, and named by tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from support.plain_models import Linked, Wide

__all__ = ["Fused", "Zoo", "save"]


class Zoo(Linked):
    """A :class:`Linked` with tensors of every other kind: empty, complex, bool, half; buffers of both sorts; tensors on the CPU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__(width)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.waves = nn.Parameter(torch.zeros(6, dtype=torch.complex64))
        self.switches = nn.Parameter(torch.zeros(9, dtype=torch.bool), requires_grad=False)
        self.halves = nn.Parameter(torch.zeros(3, 7, dtype=torch.float16))
        self.brains = nn.Parameter(torch.zeros(7, 3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("nothing", torch.zeros(0, 3), persistent=False)
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool), persistent=False)
        self.limits = torch.tensor([0.5, 2.0])
        self.named = {"low": torch.arange(4), "nested": [torch.tensor(3.5)]}

    def forward(self, ids: torch.Tensor) -> Any:
        answer, more = super().forward(ids)
        factor = float(self.limits.sum()) + float(self.named["nested"][0])
        rest = (self.waves.abs().sum(), self.halves.float().sum(), self.brains.float().sum(), self.switches.sum(), self.mask.sum())
        return answer * factor + self.mean.sum(), more, *rest


class Fused(Wide):
    """A :class:`Wide` in which layers share: the first two lie in one storage, the last is tied to the first."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__(layers)
        both = torch.zeros(2048, 1024)
        self.layers[0].weight, self.layers[1].weight = nn.Parameter(both[:1024]), nn.Parameter(both[1024:])
        self.layers[-1].weight = self.layers[0].weight  # type: ignore[assignment]
        self.corner = self.layers[0].weight.detach()[:3, :3]  # type: ignore[index]


class Odd(nn.Module):
    """Matrices of ``rows`` KiB each."""

    def __init__(self, rows: int, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(rows, 256)) for _ in range(layers))


def save(cls: type[nn.Module], path: Path, *, seed: int = 0, **kwargs: Any) -> str:
    """Write a checkpoint of random values for every dtype; of tied names the first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in cls(**kwargs).state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                state[name] = (torch.randn(tensor.shape) * 3).to(tensor.dtype)
    save_file(state, path)
    return str(path)
