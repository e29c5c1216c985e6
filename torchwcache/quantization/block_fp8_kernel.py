"""Multiplying block FP8 on the tensor cores: ``torch.nn.functional.scaled_mm`` with scales per block, where there is one.

The weight stays as it is: the kernel reads its float8 values and, beside them, its scales. The input is quantized on the fly, each
row by 128 columns at a time. What the kernel demands (torch, ``aten/src/ATen/native/cuda/ScaledBlas.cpp``; cuBLAS, section
"128-element 1D and 128x128 2D block scaling"):

- a GPU of compute capability 9.0 and CUDA 12.9 or newer;
- the input row-major, the weight column-major (``weight.t()`` of a contiguous weight is), both at addresses divisible by 16;
- the input's scales as ``(rows, in / 128)``, column by column in memory; rows in fours;
- the weight's scales as ``(in / 128, out / 128)``, column by column in memory, each column padded to a multiple of four scales.
  Without that, early releases multiply with wrong scales and say nothing, newer ones refuse;
- results in bfloat16 or float32.

Nothing here synchronizes with the GPU, so all of it can be captured into a CUDA graph.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch
import torch.nn.functional as F

from torchwcache.quantization.block_fp8 import BLOCK, FLOAT8

__all__ = ["SWITCH", "multiply", "quantize_activation", "refusal", "refusal_of_device", "scales_for_kernel", "takes"]

SWITCH = "TORCHWCACHE_FP8_KERNEL"
"""Environment variable: ``auto``, or ``dequantize`` to leave the kernel unused. Read once in a process."""

_CAPABILITY = (9, 0)
_CUDA = (12, 9)
_ROWS_AT_A_TIME = 4
_SCALES_AT_A_TIME = 4
_ALIGNMENT = 16
_LARGEST = torch.finfo(FLOAT8).max
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refusal_of_machine(
    *, switch: str, capability: tuple[int, int], cuda: str | None, hip: str | None, has_scaled_mm: bool
) -> str | None:
    """Why the kernel is not to be used on this machine, or ``None``.

    Args:
        switch: What the environment variable says.
        capability: The GPU's compute capability.
        cuda: The version that torch was built for.
        hip: Likewise, of ROCm.
        has_scaled_mm: Whether torch has ``torch.nn.functional.scaled_mm`` (2.10 and newer).

    Raises:
        ValueError: The switch is neither ``auto`` nor ``dequantize``.
    """
    if switch not in ("auto", "dequantize"):
        raise ValueError(f"{SWITCH} is 'auto' or 'dequantize', not {switch!r}")
    if switch == "dequantize":
        return f"{SWITCH}=dequantize"
    if hip is not None or cuda is None:
        return "torch is not built for CUDA"
    if not has_scaled_mm:
        return "this torch has no torch.nn.functional.scaled_mm"
    if tuple(int(part) for part in cuda.split(".")[:2]) < _CUDA:
        return f"torch is built for CUDA {cuda}, older than 12.9"
    if capability != _CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, not 9.0"
    return None


@functools.cache
def _refusal_of_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"a tensor on {device.type}, not on CUDA"
    return refusal_of_machine(
        switch=os.environ.get(SWITCH) or "auto",
        capability=torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        has_scaled_mm=hasattr(F, "scaled_mm") and hasattr(F, "ScalingType"),
    )


def refusal_of_device(device: torch.device) -> str | None:
    """Why the kernel is not to be used there, or ``None``. Constant in a process, so ``torch.compile`` does not trace it."""
    return _refusal_of_device(device)


# What ``torch.compiler.assume_constant_result`` does, which imports the compiler for it: 800 modules and 70 MB in every process.
refusal_of_device._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def refusal(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], block: tuple[int, int]) -> str | None:
    """Why a layer is not computed by the kernel, or ``None``.

    Args:
        device: Of the tensors.
        dtype: Of the input.
        shape: Of the weight, ``(out, in)``. ``out`` may be ragged: see :func:`takes`.
        block: Rows and columns of a block.
    """
    if (reason := _refusal_of_device(device)) is not None:
        return reason
    return refusal_of_layer(dtype, shape, block)


def refusal_of_layer(dtype: torch.dtype, shape: tuple[int, ...], block: tuple[int, int]) -> str | None:
    """The part of :func:`refusal` that is the same on every machine."""
    if block != BLOCK:
        return f"blocks of {block[0]} x {block[1]}, not 128 x 128"
    if dtype not in _DTYPES:
        return f"an input of {dtype}"
    if len(shape) != 2 or shape[0] < BLOCK[0]:
        return f"a weight of {shape}, without one whole row of blocks"
    if shape[1] % BLOCK[1]:
        return f"a weight of {shape}, whose columns are not whole blocks"
    return None


def takes(x: torch.Tensor, weight: torch.Tensor, block: tuple[int, int]) -> bool:
    """Whether :func:`multiply` can be used for the rows of the weight that are in whole blocks."""
    return (
        refusal(x.device, x.dtype, tuple(weight.shape), block) is None
        and x.numel() > 0
        and weight.is_contiguous()
        and weight.data_ptr() % _ALIGNMENT == 0
    )


def quantize_activation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize an input, each row by 128 columns at a time, with a 448th of their largest magnitude as scale.

    Zeros have the smallest scale, 2**-126, and stay zeros. A NaN or an infinity makes its own row of the result NaN, and no other.

    Args:
        x: ``(rows, in)``, ``in`` a multiple of 128.

    Returns:
        float8_e4m3fn of the same shape, and its float32 scales ``(rows, in / 128)``, column by column in memory.
    """
    rows, columns = x.shape
    tiles = x.unflatten(-1, (columns // BLOCK[1], BLOCK[1]))  # type: ignore[no-untyped-call]
    # Made as it has to lie: turning it afterwards is another launch, and does nothing to a single row.
    scale = torch.empty((columns // BLOCK[1], rows), dtype=torch.float32, device=x.device).t()
    largest = torch.linalg.vector_norm(tiles, math.inf, dim=-1, dtype=torch.float32)
    torch.mul(largest, 1 / _LARGEST, out=scale)
    scale.clamp_(min=_SMALLEST_SCALE)
    return (tiles / scale[..., None]).to(FLOAT8).flatten(-2), scale


def scales_for_kernel(scale_inv: torch.Tensor) -> torch.Tensor:
    """A weight's scales as the kernel reads them: a view where they lie like that already, else a copy, a few KiB, made each time.

    Args:
        scale_inv: ``(out / 128, in / 128)``; float32 or bfloat16.

    Returns:
        ``(in / 128 rounded up to a multiple of 4, out / 128)`` float32, column by column in memory.
    """
    rows, columns = scale_inv.shape
    length = columns + -columns % _SCALES_AT_A_TIME
    lies_right = scale_inv.stride() == (length, 1) and scale_inv.data_ptr() % _ALIGNMENT == 0
    if columns == length and lies_right and scale_inv.dtype is torch.float32:
        return scale_inv.t()
    padded = torch.zeros((rows, length), dtype=torch.float32, device=scale_inv.device)
    padded[:, :columns] = scale_inv
    return padded.t()


def _scaled_mm(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kernel: Any = F.scaled_mm
    recipes: Any = F.ScalingType
    product: torch.Tensor = kernel(
        a, b, scale_a, recipes.BlockWise1x128, scale_b, recipes.BlockWise128x128, output_dtype=dtype, use_fast_accum=False
    )
    return product


def multiply(x: torch.Tensor, weight: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    """``x @ dequantized(weight).T`` with a quantized ``x``, in the dtype of ``x``.

    The same bits for the same input on the same GPU, in every process. Not differentiable.

    Args:
        x: ``(..., in)``, at least one row.
        weight: float8_e4m3fn, ``(out, in)``, both multiples of 128, contiguous, at an address divisible by 16.
        scale_inv: One scale per 128 x 128.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    if rows % _ROWS_AT_A_TIME:
        flat = F.pad(flat, (0, 0, 0, -rows % _ROWS_AT_A_TIME))
    quantized, scale = quantize_activation(flat)
    # float16 comes by way of float32, which the kernel gives and which it fits into.
    dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    product = _scaled_mm(quantized, weight.t(), scale, scales_for_kernel(scale_inv), dtype)
    return product[:rows].to(x.dtype).view(*x.shape[:-1], weight.shape[0])
