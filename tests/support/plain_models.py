"""Plain modules, and work after loading, as users of torchwcache write them. Imported by workers, and named by tests."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["Deep", "Layer", "Linked", "Normed", "Resolving", "Wide", "save"]

HERE = __name__


class Linked(nn.Module):
    """Ties, a non-persistent buffer, and views of weights in lists and dicts, all of which its answer depends on."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(16, width))
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed
        self.register_buffer("angles", torch.tensor([0.1 * i for i in range(width)]), persistent=False)
        weight = self.block.weight.detach()
        self.conv_weights = [weight, weight[: width // 2]]
        self.parts = {"upper": weight[: width // 2], "both": (weight[width // 2 :], self.block.weight)}
        self.scale = 1.0

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"ids": torch.arange(12).reshape(2, 6)}

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.block(nn.functional.embedding(ids, self.embed) + self.angles) * self.scale
        x = x @ self.conv_weights[0].T + (x @ self.parts["upper"].T).repeat(1, 1, 2) + x @ self.parts["both"][1]
        return self.head(x), self.extra(x)

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        """Uses what :func:`stamp` leaves in the module, if it was called."""
        if getattr(self, "windows", None) is None:
            return x
        return x[..., :4] @ self.windows.T + self.w_kc.sum()


class Layout(enum.Enum):
    PLAIN = 1
    SHUFFLED = 2


def stamp(module: nn.Module) -> None:
    """Work after loading that leaves flags and tensors behind, as engines do."""
    module.format_ue8m0 = True  # type: ignore[assignment]
    module.layout = Layout.SHUFFLED  # type: ignore[assignment]
    module.input_scale = None
    module.block.is_shuffled = True  # type: ignore[union-attr]
    module.shapes = {"kernel": (3, torch.float16), "order": [2, 0, 1]}  # type: ignore[assignment]
    weight = module.block.weight  # type: ignore[union-attr]
    weight.scale_format = "ue8m0"  # type: ignore[union-attr]
    module.windows = weight.detach().as_strided((5, 4), (3, 2), 1)  # type: ignore[union-attr,operator]
    module.again = weight.detach().as_strided((4, 3), (5, 7), 2)  # type: ignore[union-attr,operator]
    module.w_kc = torch.linspace(0, 1, 6).reshape(2, 3)


def wrap(module: nn.Module) -> None:
    """Leaves something behind that no manifest can carry."""
    module.handle = Opaque(open(os.devnull))  # type: ignore[assignment] # noqa: SIM115 - an open file is opaque


class Opaque:
    __slots__ = ("file",)

    def __init__(self, file: Any) -> None:
        self.file = file


def drop_bias(module: nn.Module) -> None:
    """Deletes a parameter's values: what is left is on meta."""
    module.block.bias = nn.Parameter(module.block.bias.to("meta"))  # type: ignore[union-attr,operator]


def double(module: nn.Module) -> None:
    with torch.no_grad():
        module.block.weight.mul_(2)  # type: ignore[union-attr,operator]


class Layer(nn.Linear):
    """Its class says in which layout its weights are."""

    layout = "row"


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(4, 4)

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 if Layer.layout == "row" else 2)


def set_class_attribute(module: nn.Module) -> None:
    Layer.layout = "column"


class Normed(nn.Module):
    """Writes its buffers whenever it runs in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1))

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.arange(32, dtype=torch.float32).reshape(8, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(x)


class Resolving(nn.Module):
    """Chooses a kernel while it is built, from a variable that no fingerprint knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kernel = os.environ.get("TEST_KERNEL", "auto")

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Peeking(nn.Module):
    """Looks at the values of its weights while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.top = float(self.linear.weight.abs().max().item()) >= 0
        self.linear.top = self.top  # type: ignore[assignment]

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def build_without_peeking() -> nn.Module:
    module = Peeking.__new__(Peeking)
    nn.Module.__init__(module)
    module.linear = nn.Linear(4, 4)
    module.top = module.linear.top = True  # type: ignore[assignment]
    return module


class Deep(nn.Module):
    """Many small tensors."""

    def __init__(self, tensors: int = 2000) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(tensors))

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            x = x * 0.5 + row
        return x


class Wide(nn.Module):
    """Many bytes: so many layers of four MiB each."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1, 1024)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * 0.1
        return x


def replace_weights(module: nn.Module) -> None:
    """Work after loading that puts every weight into memory of its own, as repacking does."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


class Partial(nn.Module):
    """Initializes its head at random; checkpoints of the trunk alone exist."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(2, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


def save(cls: type[nn.Module], path: Path, *, seed: int = 0, change: tuple[str, int] | None = None, **kwargs: Any) -> str:
    """Write a checkpoint with weights from ``seed``; ``change`` names a tensor and an element that is made another value."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = cls(**kwargs)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    state = module.state_dict()
    tied: dict[int, str] = {}
    state = {name: tensor for name, tensor in state.items() if tied.setdefault(tensor.data_ptr(), name) == name}
    if change is not None:
        name, element = change
        state[name] = state[name].clone()
        state[name].view(-1)[element] += 1
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)
    return str(path)
