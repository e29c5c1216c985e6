"""Modules whose weights stay block-wise FP8, and which compute without ever dequantizing a large matrix as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchwcache.quantization import block_fp8, block_fp8_kernel
from torchwcache.quantization.block_fp8 import BLOCK, FLOAT8, check_block, dequantized_rows, grid_of, rows_at_once

__all__ = ["BlockFP8Experts", "BlockFP8Linear", "block_fp8_linear"]


def block_fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ dequantized(weight).T + bias``, in the dtype of ``x``.

    This is the one place that multiplies. Where torch and the GPU multiply float8 in blocks of 128 x 128
    (:mod:`torchwcache.quantization.block_fp8_kernel`), whole blocks go there, with ``x`` quantized on the fly; everything else is
    dequantized by a few rows of blocks at a time. Differentiable in ``x`` and ``bias``, as if ``x`` were not quantized.

    Args:
        x: ``(..., in)``.
        weight: float8_e4m3fn, ``(out, in)``.
        scale_inv: One scale per block.
        block: Rows and columns of a block.
        bias: ``(out,)``.
    """
    weight, scale_inv = weight.detach(), scale_inv.detach()
    if block_fp8_kernel.refusal_of_device(x.device) is not None:
        return _dequantizing(x, weight, scale_inv, block, bias)
    if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if wants_gradient or torch.compiler.is_compiling() or type(x) is not torch.Tensor:
        # An operator has a gradient, a form for fake tensors, and is opaque to torch.compile, whose own idea of how the scales lie
        # differs between releases. The bits are the same; the call below only saves some 20 microseconds.
        found: torch.Tensor = _operator(x, weight, scale_inv, block[0], block[1], bias)
        return found
    return _multiply(x, weight, scale_inv, block, bias)


def _dequantizing(
    x: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], bias: torch.Tensor | None
) -> torch.Tensor:
    step = rows_at_once(weight.shape[1], block[0])
    parts = []
    for start in range(0, weight.shape[0], step):
        rows = dequantized_rows(weight, scale_inv, block, start, step).to(x.dtype)
        parts.append(F.linear(x, rows, None if bias is None else bias[start : start + step]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], bias: torch.Tensor | None
) -> torch.Tensor:
    """By the kernel what it takes, without autograd."""
    if not block_fp8_kernel.takes(x, weight, block):
        return _dequantizing(x, weight, scale_inv, block, bias)
    blocks = weight.shape[0] // block[0]
    whole = blocks * block[0]
    found = block_fp8_kernel.multiply(x, weight[:whole], scale_inv[:blocks])
    if whole < weight.shape[0]:  # the edge: less than one block of rows
        found = torch.cat([found, _dequantizing(x, weight[whole:], scale_inv[blocks:], block, None)], dim=-1)
    return found if bias is None else found.add_(bias)


@torch.library.custom_op(
    "torchwcache::block_fp8_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor scale_inv, int block_rows, int block_columns, Tensor? bias) -> Tensor",
)
def _operator(
    x: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor, block_rows: int, block_columns: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return _multiply(x, weight, scale_inv, (block_rows, block_columns), bias).contiguous()


@_operator.register_fake
def _shape_of_result(
    x: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor, block_rows: int, block_columns: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, scale_inv, block_rows, block_columns, bias = inputs
    ctx.save_for_backward(weight, scale_inv)
    ctx.block, ctx.dtype, ctx.bias_dtype = (block_rows, block_columns), x.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None, torch.Tensor | None]:
    weight, scale_inv = ctx.saved_tensors
    for_x = for_bias = None
    if ctx.needs_input_grad[0]:
        step = rows_at_once(weight.shape[1], ctx.block[0])
        for start in range(0, weight.shape[0], step):
            rows = dequantized_rows(weight, scale_inv, ctx.block, start, step).to(ctx.dtype)
            part = gradient[..., start : start + step] @ rows
            for_x = part if for_x is None else for_x + part
    if ctx.needs_input_grad[5]:
        for_bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype) if gradient.dim() > 1 else gradient.to(ctx.bias_dtype)
    return for_x, None, None, None, None, for_bias


_operator.register_autograd(_backward, setup_context=_keep_for_backward)


class _KeepsFloat8(nn.Module):
    """``module.to(dtype)``, ``.half()`` and their like go by; a float8 weight that is cast loses the meaning of its scales."""

    float8_names: tuple[str, ...] = ()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        kept = {id(self._parameters[name]) for name in self.float8_names}
        kept |= {id(self._parameters[f"{name}_scale_inv"]) for name in self.float8_names}

        def apply(tensor: torch.Tensor) -> Any:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype is not tensor.dtype:
                return tensor.to(moved.device)
            return moved

        return super()._apply(apply, recurse)  # type: ignore[no-untyped-call]


def _zeros(shape: tuple[int, ...], device: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=FLOAT8, device=device), requires_grad=False)


def _ones(shape: tuple[int, ...], device: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=torch.float32, device=device), requires_grad=False)


class BlockFP8Linear(_KeepsFloat8):
    """A linear layer with a block-wise FP8 weight.

    Parameters: ``weight`` (float8_e4m3fn, ``(out, in)``), ``weight_scale_inv`` (float32, one per block), ``bias`` (``(out,)``, in
    the dtype that the layer computes in, or ``None``).

    Args:
        in_features: Size of the input.
        out_features: Size of the output.
        bias: Whether there is a bias.
        block_size: Rows and columns of a block.
        device: Of the parameters.
        dtype: Of the bias; torch's default when ``None``.

    Raises:
        ValueError: The block is no block, or larger than the weight.
    """

    float8_names = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        block_size: tuple[int, int] = BLOCK,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shape = (out_features, in_features)
        self.in_features, self.out_features = in_features, out_features
        self.block_size = check_block(block_size, shape)
        self.weight = _zeros(shape, device)
        self.weight_scale_inv = _ones(grid_of(shape, self.block_size), device)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, block_size: tuple[int, int] = BLOCK) -> BlockFP8Linear:
        """Quantize a layer. On the meta device this only makes the layer that would come of it."""
        weight, bias = linear.weight, linear.bias
        made = cls(
            linear.in_features, linear.out_features, bias is not None, block_size=block_size, device="meta", dtype=weight.dtype
        )
        if not weight.is_meta:
            quantized, scales = block_fp8.quantize_block_fp8(weight, made.block_size)
            made.weight = nn.Parameter(quantized, requires_grad=False)
            made.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        if bias is not None:
            made.bias = bias
        return made.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(..., in)`` to ``(..., out)``, in the dtype of the input."""
        return block_fp8_linear(x, self.weight, self.weight_scale_inv, self.block_size, self.bias)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The whole weight: for looking at it, not for computing with it."""
        return block_fp8.dequantize_block_fp8(self.weight, self.weight_scale_inv, self.block_size, dtype)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        rows, columns = self.block_size
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, block={rows}x{columns}"


class BlockFP8Experts(_KeepsFloat8):
    """All experts of a mixture-of-experts layer in one tensor each, as Transformers fuses them.

    Parameters: ``gate_up_proj`` (float8_e4m3fn, ``(experts, 2 * intermediate, hidden)``, the gate's rows first), ``down_proj``
    (``(experts, hidden, intermediate)``), and ``gate_up_proj_scale_inv`` and ``down_proj_scale_inv`` (float32). Gate and up are
    quantized each by itself, as the checkpoints hold them: with ragged edges the grid of blocks begins anew at the up rows, and the
    scales have ``2 * ceil(intermediate / rows)`` rows.

    Args:
        experts: How many.
        hidden: Size of the model's hidden states.
        intermediate: Size within an expert.
        act_fn: Applied to the gate.
        block_size: Rows and columns of a block.
        device: Of the parameters.

    Raises:
        ValueError: The block is no block, or larger than a weight.
    """

    float8_names = ("gate_up_proj", "down_proj")

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        act_fn: Callable[[torch.Tensor], torch.Tensor],
        *,
        block_size: tuple[int, int] = BLOCK,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = experts, hidden, intermediate
        self.block_size = check_block(block_size, (intermediate, hidden))
        check_block(block_size, (hidden, intermediate))
        half = grid_of((experts, intermediate, hidden), self.block_size)
        self.gate_up_proj = _zeros((experts, 2 * intermediate, hidden), device)
        self.gate_up_proj_scale_inv = _ones((half[0], 2 * half[1], half[2]), device)
        self.down_proj = _zeros((experts, hidden, intermediate), device)
        self.down_proj_scale_inv = _ones(grid_of((experts, hidden, intermediate), self.block_size), device)
        self.act_fn = act_fn

    @staticmethod
    def quantize_gate_up(weight: torch.Tensor, block_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a fused ``(experts, 2 * intermediate, hidden)`` weight, each half by itself."""
        halves = [block_fp8.quantize_block_fp8(half, block_size) for half in weight.chunk(2, dim=1)]
        return torch.cat([weight for weight, _ in halves], dim=1), torch.cat([scales for _, scales in halves], dim=1)

    def _gate_up(self, x: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.gate_up_proj[expert].chunk(2)
        scales = self.gate_up_proj_scale_inv[expert].chunk(2)
        gate, up = (block_fp8_linear(x, w, s, self.block_size) for w, s in zip(weights, scales, strict=True))
        return gate, up

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Route tokens through their experts, one expert after the other.

        Args:
            hidden_states: ``(tokens, hidden)``.
            top_k_index: ``(tokens, k)``, int64: the experts of each token; the number of experts means none.
            top_k_weights: ``(tokens, k)``: with what weight each counts.

        Returns:
            ``(tokens, hidden)``, in the dtype of the hidden states; summed in float32 in the order of the experts, so that it
            is the same in every process.
        """
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.num_experts:
                continue
            tokens, position = torch.where(top_k_index == expert)
            gate, up = self._gate_up(hidden_states[tokens], expert)
            inner = self.act_fn(gate) * up
            out = block_fp8_linear(inner, self.down_proj[expert], self.down_proj_scale_inv[expert], self.block_size)
            out = out * top_k_weights[tokens, position, None].to(out.dtype)
            total = total.index_add(0, tokens, out.float())
        return total.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        rows, columns = self.block_size
        return f"experts={self.num_experts}, hidden={self.hidden_dim}, intermediate={self.intermediate_dim}, block={rows}x{columns}"
