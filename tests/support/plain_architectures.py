"""Modules that are no Transformers folders: layers of torch itself, parametrized and hooked ones, models of diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["Attending", "Bare", "Batched", "Hooked", "Normed", "Recurrent", "add_hook", "dit", "script", "unet"]


def _numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, bidirectional=True, proj_size=3)
        self.gru = nn.GRU(6, 4)

    def example_inputs(self) -> dict[str, Any]:
        return {"x": _numbers(5, 2, 4)}

    def forward(self, x: torch.Tensor) -> Any:
        return self.gru(self.lstm(x)[0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.MultiheadAttention(8, 2, batch_first=True)
        self.other = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def example_inputs(self) -> dict[str, Any]:
        return {"x": _numbers(2, 5, 8), "k": _numbers(2, 7, 6), "v": _numbers(2, 7, 4)}

    def forward(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.layer(self.one(x, x, x)[0]), self.other(x, k, v)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(4, 6, 3))
        self.linear = weight_norm(nn.Linear(6, 2))

    def example_inputs(self) -> dict[str, Any]:
        return {"x": _numbers(2, 4, 9)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).mean(-1))


def _double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.linear.register_forward_hook(_double)
        self.linear.register_forward_pre_hook(self.before)

    def before(self, module: nn.Module, args: Any) -> Any:
        return (args[0] + self.shift,)

    def example_inputs(self) -> dict[str, Any]:
        return {"x": _numbers(3, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def example_inputs(self) -> dict[str, Any]:
        return {"x": _numbers(3, 4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def add_hook(module: nn.Module) -> None:
    module.linear.register_forward_hook(_double)  # type: ignore[union-attr,operator]


def script(module: nn.Module) -> None:
    module.linear = torch.jit.script(module.linear)  # type: ignore[assignment]


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def example_inputs(self) -> dict[str, Any]:
        return {"x": _numbers(2, 2, 6, 6)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    model: nn.Module = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=12,
        attention_head_dim=4, norm_num_groups=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model


def dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model: nn.Module = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
        norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip
    return model


def diffusers_inputs(model: Any) -> dict[str, Any]:
    """What a model of diffusers takes."""
    inputs: dict[str, Any] = {"timestep": torch.tensor([3, 5])}
    if type(model).__name__ == "UNet2DConditionModel":
        return {**inputs, "sample": _numbers(2, 4, 8, 8), "encoder_hidden_states": _numbers(2, 5, 12)}
    return {**inputs, "hidden_states": _numbers(2, 4, 8, 8), "class_labels": torch.tensor([1, 2])}
