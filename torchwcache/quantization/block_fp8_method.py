"""The method ``fp8``: every float8 weight has a float32 scale per block beside it, and nothing else is quantized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchwcache.quantization.block_fp8 import BLOCK, FLOAT8, check_block, grid_of
from torchwcache.quantization.block_fp8_config import METHOD, problem_of, settings_of
from torchwcache.quantization.registry import refuse
from torchwcache.quantization.unquantized import check_module, tensors_of

__all__ = ["BlockFP8"]

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})
_FIXED_ACTIVATIONS = re.compile(r"(.*_)?(input|activation|act)_scale(_inv)?")
_TWO_HALVES = re.compile(r".*gate_up.*|w13_weight")
"""Fused weights whose halves have blocks of their own."""


class BlockFP8:
    """Block-wise FP8 in the layout of DeepSeek-V3 and Qwen3, whatever its config calls it."""

    name = METHOD
    version = "1"
    quantizes = True
    evidence = (
        "tests/process/test_fp8.py: attached against loaded, bit for bit, for Qwen3, Qwen3-MoE and DeepSeek-V3, quantized on disk "
        "and at load; tests/property/test_block_fp8_properties.py: the error of the arithmetic"
    )

    def accepts(self, quantization_config: Mapping[str, Any] | None) -> bool:
        """``fp8`` with a block size, or ``compressed-tensors`` with nothing but float8 weights of strategy ``block``."""
        return bool(quantization_config) and problem_of(quantization_config or {}) is None

    def check_tensors(self, module: nn.Module, quantization_config: Mapping[str, Any] | None = None) -> None:
        """Find the scales of every float8 weight, and refuse every other sign of a quantized layout.

        The block is that of the module (``block_size``), else the config's, else 128 x 128; the two must not contradict each other.

        Raises:
            UnsupportedQuantizationError: Names the tensor; or there is no float8 weight at all.
        """
        stated = settings_of(quantization_config).block if quantization_config and self.accepts(quantization_config) else None
        found = 0
        for path, child in module.named_modules():
            tensors = {name: tensor for name, tensor, _ in tensors_of(child)}
            weights = [name for name, tensor in tensors.items() if tensor.dtype in _FLOAT8]
            block = _block_of(path, child, stated) if weights else BLOCK
            explained = {part for name in weights for part in (name, _check_weight(path, name, tensors, block))}
            found += len(weights)
            check_module(path, child, explained)
        if not found:
            raise refuse(
                METHOD,
                None,
                "the model is said to be fp8, but none of its tensors is float8: nothing in it could be quantized, or it was "
                "dequantized while loading",
            )


def _block_of(path: str, module: nn.Module, stated: tuple[int, int] | None) -> tuple[int, int]:
    own = getattr(module, "block_size", None)
    if not isinstance(own, (tuple, list)) or len(own) != 2:
        return stated or BLOCK
    if stated is not None and tuple(own) != stated:
        raise refuse(METHOD, path, f"its blocks are {own[0]} x {own[1]}, and the config says {stated[0]} x {stated[1]}")
    return own[0], own[1]


def _check_weight(path: str, name: str, tensors: Mapping[str, torch.Tensor], block: tuple[int, int]) -> str:
    """Check a weight and its scales, and return the name of the scales."""
    where, weight = f"{path}.{name}".lstrip("."), tensors[name]
    found = str(weight.dtype).removeprefix("torch.")
    if weight.dtype is not FLOAT8:
        raise refuse(found, where, "only float8_e4m3fn weights are verified")
    fixed = [other for other in tensors if _FIXED_ACTIVATIONS.fullmatch(other) is not None]
    if fixed:
        raise refuse(METHOD, where, f"{fixed[0]!r} beside it holds scales of activations, which are not verified")
    candidates = [scale for scale in (f"{name}_scale_inv", f"{name}_scale") if scale in tensors]
    if len(candidates) != 1:
        what = f"both {' and '.join(candidates)}" if candidates else "no block scales"
        raise refuse(found, where, f"a float8 weight with {what} beside it (expected {name}_scale_inv)")
    if weight.dim() not in (2, 3):
        raise refuse(found, where, f"a float8 tensor of {weight.dim()} dimensions is no weight of blocks")
    if (problem := _problem_of_scales(name, weight, tensors[candidates[0]], block)) is not None:
        raise refuse(METHOD, f"{path}.{candidates[0]}".lstrip("."), problem)
    return candidates[0]


def _problem_of_scales(name: str, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> str | None:
    shape, given = tuple(weight.shape), tuple(scales.shape)
    halves = 2 if _TWO_HALVES.fullmatch(name) is not None and shape[-2] % 2 == 0 else 1
    part = (*shape[:-2], shape[-2] // halves, shape[-1])
    try:
        block = check_block(block, part)
    except ValueError as error:
        return str(error)
    if block[0] == 1 and block[1] == shape[-1]:
        return "a block of one whole row is a scale per channel"
    grid = grid_of(part, block)
    expected = (*grid[:-2], halves * grid[-2], grid[-1])
    if given == expected:
        if scales.dtype is not torch.float32:
            return f"the scales are {scales.dtype}, not float32"
        return None
    if scales.numel() == 1 or given == shape[:-2]:
        kind = "one scale for the whole tensor"
    elif given == (*expected[:-2], expected[-1], expected[-2]):
        kind = "transposed scales"
    elif given in ((*shape[:-1],), (*shape[:-1], 1), (*shape[:-2], 1, shape[-1]), (*shape[:-2], shape[-1])):
        kind = "one scale per channel"
    else:
        kind = "scales of another shape"
    return f"{kind}: {given}, where a weight of {shape} in blocks of {block[0]} x {block[1]} has {expected}"
