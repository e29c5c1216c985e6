"""Any weight, any block: the error is at most half a float8 step at the block's scale, measured in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchwcache.quantization.block_fp8 import dequantize_block_fp8, grid_of, quantize_block_fp8
from torchwcache.quantization.block_fp8_layers import BlockFP8Linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = 2.0**-22
"""Division and multiplication are done in float32, and round too; far less than float8 does."""


@st.composite
def weights(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[int, int]]:
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    block = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn((*batch, rows, columns), generator=generator)
    # Magnitudes far apart within a block and between blocks, zeros, and denormals.
    spread = draw(st.sampled_from([0.0, 2.0, 30.0]))
    weight = weight * torch.exp2((spread * torch.randn(weight.shape, generator=generator)).clamp(-100, 100).round())
    weight = weight * 2.0 ** draw(st.integers(-120, 20))
    weight = torch.where(torch.rand(weight.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0])), 0.0, weight)
    dtype = draw(st.sampled_from(DTYPES))
    return weight.clamp(-6e4, 6e4).to(dtype), block


def spread_out(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    wide = scales.double().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : shape[-2], : shape[-1]]


def step(magnitude: torch.Tensor) -> torch.Tensor:
    """The distance of two neighbouring float8_e4m3fn numbers there: three bits of mantissa, exponents from -6 up."""
    exponent = torch.frexp(magnitude)[1].double() - 1
    return torch.exp2(exponent.clamp(min=-6) - 3)


@settings(max_examples=150)
@given(weights())
def test_the_error_is_at_most_half_a_step(case: tuple[torch.Tensor, tuple[int, int]]) -> None:
    weight, block = case
    quantized, scales = quantize_block_fp8(weight, block)
    assert scales.shape == grid_of(weight.shape, block)
    exact, scale = weight.double(), spread_out(scales, block, weight.shape)
    allowed = 0.5 * step(exact.abs() / scale) * scale + exact.abs() * ROUNDING
    assert ((quantized.double() * scale - exact).abs() <= allowed).all()
    back = dequantize_block_fp8(quantized, scales, block)
    assert ((back.double() - quantized.double() * scale).abs() <= exact.abs() * ROUNDING + 2.0**-149).all()
    assert (scales >= torch.finfo(torch.float32).tiny).all()


@settings(max_examples=60)
@given(weights())
def test_quantizing_again_changes_little_and_the_largest_nothing(case: tuple[torch.Tensor, tuple[int, int]]) -> None:
    weight, block = case
    quantized, scales = quantize_block_fp8(weight, block)
    again, same = quantize_block_fp8(weight.clone(), block)
    assert torch.equal(again.view(torch.uint8), quantized.view(torch.uint8))
    assert torch.equal(same, scales)
    back = dequantize_block_fp8(quantized, scales, block)
    twice, _ = quantize_block_fp8(back, block)
    largest = quantized.float().abs() == 448
    assert torch.equal(twice.float()[largest], quantized.float()[largest])


@settings(max_examples=40)
@given(weights(), st.integers(1, 5))
def test_a_layer_is_within_the_error_that_its_weight_has(case: tuple[torch.Tensor, tuple[int, int]], tokens: int) -> None:
    weight, block = case
    matrix = weight.float()[0] if weight.dim() == 3 else weight.float()
    quantized, scales = quantize_block_fp8(matrix, block)
    layer = BlockFP8Linear(matrix.shape[1], matrix.shape[0], bias=False, block_size=block)
    layer.load_state_dict({"weight": quantized, "weight_scale_inv": scales})
    x = torch.randn(tokens, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    scale = spread_out(scales, block, matrix.shape)
    allowed = x.double().abs() @ (0.5 * step(matrix.double().abs() / scale) * scale).t()
    rounding = x.double().abs() @ matrix.double().abs().t() * 2.0**-16 + 2.0**-120
    with torch.no_grad():
        error = (layer(x).double() - x.double() @ matrix.double().t()).abs()
    assert (error <= allowed + rounding).all()
