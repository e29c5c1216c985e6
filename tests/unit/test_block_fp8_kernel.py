"""Block FP8 by a kernel that takes float8: what goes there, in which layout, and how exact it is.

Without a GPU the kernel itself is stood in for by :func:`stand_in`, which insists on what the real one demands and reads the scales
out of memory as the real one does. The tests in ``tests/gpu`` have the real one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.quantization import block_fp8_kernel, block_fp8_layers
from torchwcache.quantization.block_fp8 import BLOCK, FLOAT8, dequantize_block_fp8, quantize_block_fp8
from torchwcache.quantization.block_fp8_layers import BlockFP8Experts, BlockFP8Linear, block_fp8_linear

INPUT_BOUND = 2.0**-4
"""Rounding to float8_e4m3fn moves a number by at most 2**-4 of itself (three bits of mantissa), so the input as a whole, by norm,
by at most that; errors of independent signs carry the ratio over to the product. A wrong scale is an error of the order of 1."""
BOTH_BOUND = 2 * INPUT_BOUND + INPUT_BOUND**2
"""Against the weight before it was quantized."""
SAME_OPERANDS_BOUND = 2.0**-7
"""Against the exact product of the very same float8 operands: what accumulating and rounding the result leave."""


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def stand_in(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    (rows, inner), outer = a.shape, b.shape[1]
    length = 4 * -(-inner // 512)
    assert a.dtype is b.dtype is FLOAT8
    assert scale_a.dtype is scale_b.dtype is torch.float32
    assert dtype in (torch.bfloat16, torch.float32)
    assert (a.stride(), b.stride()) == ((inner, 1), (1, inner))
    assert (rows % 4, inner % 128, outer % 128) == (0, 0, 0)
    assert (scale_a.shape, scale_a.stride()) == ((rows, inner // 128), (1, rows))
    assert (scale_b.shape, scale_b.stride()) == ((length, outer // 128), (1, length))
    assert all(is_aligned(t) for t in (a, b, scale_a, scale_b))
    exact_a = a.double() * scale_a.double().repeat_interleave(128, 1)
    exact_b = b.double() * scale_b[: inner // 128].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (exact_a @ exact_b).to(dtype)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """A kernel on the CPU. Gives the sizes of every multiplication that went there."""
    made: list[tuple[int, ...]] = []

    def kernel(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append((*a.shape, b.shape[1]))
        return stand_in(a, b, *rest)

    monkeypatch.setattr(block_fp8_kernel, "_scaled_mm", kernel)
    monkeypatch.setattr(block_fp8_kernel, "_refusal_of_device", lambda device: None)
    block_fp8_kernel.refusal.cache_clear()
    yield made
    block_fp8_kernel.refusal.cache_clear()


def make_weight(out: int, inner: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, and the same quantized. Neighbouring blocks differ in magnitude, so that no scale can stand in for another."""
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-out // 128), -(-inner // 128))
    spread = torch.exp2(torch.randint(-3, 4, grid, generator=generator).float())
    spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out, :inner]
    weight = torch.randn(out, inner, generator=generator) * spread
    return weight, *quantize_block_fp8(weight)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def exactly(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x.double() @ dequantize_block_fp8(weight, scales, BLOCK, torch.float64).t()


# ---- what goes to the kernel -------------------------------------------------------------------------------------------------

HOPPER: dict[str, Any] = {"switch": "auto", "capability": (9, 0), "cuda": "13.0", "hip": None, "has_scaled_mm": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"cuda": "12.9"}, None),
        ({"cuda": "12.8"}, "CUDA 12.8"),
        ({"cuda": "11.9"}, "CUDA 11.9"),
        ({"cuda": None}, "not built for CUDA"),
        ({"cuda": None, "hip": "7.0"}, "not built for CUDA"),
        ({"has_scaled_mm": False}, "no torch.nn.functional.scaled_mm"),
        ({"capability": (8, 9)}, "8.9"),
        ({"capability": (10, 0)}, "10.0"),
        ({"capability": (12, 0)}, "12.0"),
        ({"switch": "dequantize"}, "TORCHWCACHE_FP8_KERNEL=dequantize"),
    ],
)
def test_machines(change: dict[str, Any], reason: str | None) -> None:
    found = block_fp8_kernel.refusal_of_machine(**{**HOPPER, **change})
    assert found is None if reason is None else reason in str(found)


def test_a_switch_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'auto' or 'dequantize', not 'fast'"):
        block_fp8_kernel.refusal_of_machine(**{**HOPPER, "switch": "fast"})


@pytest.mark.parametrize(
    ("dtype", "shape", "block", "reason"),
    [
        (torch.bfloat16, (128, 128), (128, 128), None),
        (torch.float16, (4096, 640), (128, 128), None),
        (torch.float32, (576, 7168), (128, 128), None),
        (torch.float64, (128, 128), (128, 128), "float64"),
        (torch.bfloat16, (128, 128), (64, 128), "64 x 128"),
        (torch.bfloat16, (128, 128), (128, 64), "128 x 64"),
        (torch.bfloat16, (256, 192), (128, 128), "not whole blocks"),
        (torch.bfloat16, (64, 128), (128, 128), "one whole row"),
        (torch.bfloat16, (2, 128, 128), (128, 128), "one whole row"),
    ],
)
def test_layers(dtype: torch.dtype, shape: tuple[int, ...], block: tuple[int, int], reason: str | None) -> None:
    found = block_fp8_kernel.refusal_of_layer(dtype, shape, block)
    assert found is None if reason is None else reason in str(found)


def test_other_devices_never_go_there() -> None:
    for device in ("cpu", "meta"):
        assert block_fp8_kernel.refusal_of_device(torch.device(device)) == f"a tensor on {device}, not on CUDA"
        assert block_fp8_kernel.refusal(torch.device(device), torch.bfloat16, (128, 128), BLOCK) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: (x[:0], w),
        lambda x, w: (x, w.t().contiguous().t()),
        lambda x, w: (x, w.flatten()[1:].new_empty(w.numel() + 1)[1:].view(w.shape).copy_(w)),
        lambda x, w: (x.double(), w),
    ],
    ids=["no rows", "weight by columns", "weight at an odd address", "float64"],
)
def test_what_does_not_go_there_is_dequantized(change: Callable[..., Any], calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(256, 128)
    x, moved = change(torch.randn(5, 128), weight)
    assert not block_fp8_kernel.takes(x, moved, BLOCK)
    found, expected = block_fp8_linear(x, moved, scales, BLOCK), exactly(x, weight, scales)
    assert found.shape == expected.shape
    assert not len(x) or error(found, expected) <= 2**-18
    assert not calls


def test_ragged_columns_and_small_blocks_give_the_bits_that_dequantizing_gives(calls: list[tuple[int, ...]]) -> None:
    for (out, inner), block in (((256, 200), BLOCK), ((130, 130), BLOCK), ((256, 256), (64, 64))):
        weight, scales = quantize_block_fp8(torch.randn(out, inner), block)
        x, bias = torch.randn(3, inner), torch.randn(out)
        expected = block_fp8_layers._dequantizing(x, weight, scales, block, bias)
        assert torch.equal(block_fp8_linear(x, weight, scales, block, bias), expected)
    assert not calls


# ---- the input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (1, 640), (4, 128), (7, 384)])
def test_the_input_is_quantized_by_rows_of_128(dtype: torch.dtype, rows: int, columns: int) -> None:
    x = (torch.randn(rows, columns) * torch.exp2(torch.randint(-8, 9, (rows, columns)).float())).to(dtype)
    quantized, scale = block_fp8_kernel.quantize_activation(x)
    assert (quantized.shape, quantized.dtype, quantized.is_contiguous()) == ((rows, columns), FLOAT8, True)
    assert (scale.shape, scale.stride(), scale.dtype) == ((rows, columns // 128), (1, rows), torch.float32)
    exact = x.double()
    largest = exact.unflatten(1, (-1, 128)).abs().amax(-1)
    torch.testing.assert_close(scale.double(), largest / 448, rtol=2**-22, atol=0)
    wide = scale.double().repeat_interleave(128, 1)
    # Half a step: relative 2**-4 where float8 is normal, else half of its smallest number 2**-9; and what float32 rounds.
    allowed = torch.maximum(exact.abs() * 2**-4, wide * 2**-10) + exact.abs() * 2**-22
    assert ((quantized.double() * wide - exact).abs() <= allowed).all()


def test_zeros_denormals_and_the_largest_numbers_of_the_input() -> None:
    x = torch.zeros(4, 256)
    x[1, :128] = 2.0**-140
    x[2, 5], x[2, 6] = torch.finfo(torch.float32).max, 1.0
    x[3, 200], x[3, 201] = 2.0**-126, -(2.0**-127)
    quantized, scale = block_fp8_kernel.quantize_activation(x)
    assert scale.isfinite().all()
    assert scale.min() == 2.0**-126
    back = quantized.double() * scale.double().repeat_interleave(128, 1)
    assert back.isfinite().all()
    assert back[0].count_nonzero() == 0
    assert back[2, 5] == pytest.approx(torch.finfo(torch.float32).max, rel=1e-6)
    assert back[3, 200].item() == 2.0**-126


def test_nan_and_infinities_stay_in_their_row(calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(128, 256)
    x = torch.randn(4, 256)
    clean = block_fp8_linear(x, weight, scales, BLOCK)
    x[1, 3], x[2, 130] = math.nan, -math.inf
    found = block_fp8_linear(x, weight, scales, BLOCK)
    assert found[1:3].isnan().all()
    assert torch.equal(found[::3], clean[::3])


# ---- the weight's scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 4), (1, 8), (5, 3), (2, 5), (56, 7)])
def test_scales_are_padded_to_fours_of_columns(rows: int, columns: int) -> None:
    scales = torch.rand(rows, columns)
    before = scales.clone()
    found = block_fp8_kernel.scales_for_kernel(scales)
    length = 4 * -(-columns // 4)
    assert (found.shape, found.stride()) == ((length, rows), (1, length))
    assert torch.equal(found[:columns], scales.t())
    assert found[columns:].count_nonzero() == 0
    assert torch.equal(scales, before)
    assert (found.data_ptr() == scales.data_ptr()) == (columns % 4 == 0)


def test_scales_that_lie_otherwise_are_copied_too() -> None:
    scales = torch.rand(3, 8)
    odd = torch.empty(25)[1:].view(3, 8).copy_(scales)
    for same in (scales.t().contiguous().t(), odd, torch.cat([scales, scales], 1)[:, :8]):
        found = block_fp8_kernel.scales_for_kernel(same)
        assert torch.equal(found, scales.t())
        assert found.stride() == (1, 8)
        assert is_aligned(found)
    rough = scales.bfloat16()
    assert torch.equal(block_fp8_kernel.scales_for_kernel(rough), rough.float().t())


# ---- the product -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "out", "inner"), [((1,), 128, 128), ((7,), 256, 640), ((2, 3), 384, 512), ((), 128, 384)])
def test_the_error_is_what_float8_allows(
    dtype: torch.dtype, rows: tuple[int, ...], out: int, inner: int, calls: list[tuple[int, ...]]
) -> None:
    original, weight, scales = make_weight(out, inner)
    x, bias = torch.randn(*rows, inner).to(dtype), torch.randn(out).to(dtype)
    found = block_fp8_linear(x, weight, scales, BLOCK, bias)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((*rows, out), dtype, True)
    assert len(calls) == 1
    expected = exactly(x, weight, scales) + bias.double()
    assert 0 < error(found, expected) <= INPUT_BOUND
    assert error(found, x.double() @ original.double().t() + bias.double()) <= BOTH_BOUND
    assert error(block_fp8_layers._dequantizing(x, weight, scales, BLOCK, bias), expected) <= 2**-7


def test_the_rows_of_an_edge_are_dequantized(calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(576, 256)
    x, bias = torch.randn(6, 256), torch.randn(576)
    found = block_fp8_linear(x, weight, scales, BLOCK, bias)
    assert calls == [(8, 256, 512)]
    expected = exactly(x, weight, scales) + bias.double()
    assert error(found, expected) <= INPUT_BOUND
    assert error(found[:, 512:], expected[:, 512:]) <= 2**-18


def test_a_row_has_the_same_bits_beside_others(calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(256, 640)
    x = torch.randn(8, 640, dtype=torch.bfloat16)
    together = block_fp8_linear(x, weight, scales, BLOCK)
    assert torch.equal(torch.cat([block_fp8_linear(row, weight, scales, BLOCK) for row in x.split(1)]), together)


MUTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shifted along the columns": lambda s: s.roll(1, 1),
    "shifted along the rows": lambda s: s.roll(1, 0),
    "two swapped": lambda s: s[:, [1, 0, *range(2, s.shape[1])]],
    "transposed": lambda s: s.t(),
    "inverted": lambda s: 1 / s,
    "all one": torch.ones_like,
    "not padded": lambda s: torch.cat([s.flatten(), s.new_zeros(15)]).as_strided(s.shape, (8, 1)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_scales_of_the_weight_are_seen(mutation: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is no guard unless a wrong layout breaks it."""
    _, weight, scales = make_weight(640, 640)
    x = torch.randn(16, 640)
    expected = exactly(x, weight, scales)
    assert error(block_fp8_linear(x, weight, scales, BLOCK), expected) <= INPUT_BOUND
    right = block_fp8_kernel.scales_for_kernel
    monkeypatch.setattr(block_fp8_kernel, "scales_for_kernel", lambda s: right(MUTATIONS[mutation](s)))
    assert error(block_fp8_linear(x, weight, scales, BLOCK), expected) > 4 * BOTH_BOUND


def test_wrong_scales_of_the_input_are_seen(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, scales = make_weight(256, 640)
    x = torch.randn(16, 640) * torch.exp2(torch.randint(-3, 4, (16, 5)).float()).repeat_interleave(128, 1)
    expected = exactly(x, weight, scales)
    right = block_fp8_kernel.quantize_activation

    def shifted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scale = right(x)
        return quantized, scale.t().roll(1, 1).t()

    monkeypatch.setattr(block_fp8_kernel, "quantize_activation", shifted)
    assert error(block_fp8_linear(x, weight, scales, BLOCK), expected) > 4 * BOTH_BOUND


def test_nothing_is_written_and_nothing_is_kept(calls: list[tuple[int, ...]]) -> None:
    layer = BlockFP8Linear.from_linear(nn.Linear(640, 256))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    attributes = set(vars(layer))
    x = torch.randn(3, 640)
    kept = x.clone()
    layer(x)
    assert calls
    assert torch.equal(x, kept)
    assert set(vars(layer)) == attributes
    assert layer.state_dict().keys() == before.keys()
    assert all(torch.equal(layer.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in before.items())


def test_experts_go_there_one_by_one(calls: list[tuple[int, ...]]) -> None:
    experts = BlockFP8Experts(3, 256, 128, nn.SiLU())
    gate_up, down = torch.randn(3, 256, 256) / 16, torch.randn(3, 256, 128) / 11
    weights, scales = BlockFP8Experts.quantize_gate_up(gate_up, BLOCK)
    values = {"gate_up_proj": weights, "gate_up_proj_scale_inv": scales}
    values["down_proj"], values["down_proj_scale_inv"] = quantize_block_fp8(down)
    experts.load_state_dict(values)
    states, index, top = torch.randn(9, 256), torch.tensor([[0, 2]]).expand(9, 2), torch.rand(9, 2)
    expected = torch.zeros(9, 256)
    for place, expert in enumerate((0, 2)):
        gate, up = (states @ gate_up[expert].t()).chunk(2, -1)
        expected += (nn.functional.silu(gate) * up) @ down[expert].t() * top[:, place, None]
    assert error(experts(states, index, top), expected.double()) <= 2 * BOTH_BOUND
    assert len(calls) == 2 * 3


# ---- autograd, autocast, torch.compile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "shape"), [(256, (5,)), (300, (2, 3)), (256, ())])
def test_gradients_are_those_of_the_dequantized_weight(
    out: int, shape: tuple[int, ...], calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchwcache.quantization.block_fp8._AT_ONCE_NBYTES", 1)  # several parts
    layer = BlockFP8Linear.from_linear(nn.Linear(256, out))
    x = torch.randn(*shape, 256, requires_grad=True)
    with torch.no_grad():
        expected = layer(x)
    found = layer(x)
    assert torch.equal(found, expected)
    assert len(calls) == 2
    gradient = torch.randn_like(found)
    found.backward(gradient)
    torch.testing.assert_close(x.grad, gradient @ layer.dequantized())
    assert layer.bias is not None
    torch.testing.assert_close(layer.bias.grad, gradient.reshape(-1, out).sum(0))
    assert layer.weight.grad is None


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.14, in its own check
def test_the_operator_is_well_formed(calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(256, 128)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # the fourth cannot multiply float8
    for shape, bias in (((3, 128), torch.randn(256, requires_grad=True)), ((2, 3, 128), None)):
        x = torch.randn(shape, requires_grad=True)
        torch.library.opcheck(block_fp8_layers._operator, (x, weight, scales, 128, 128, bias), test_utils=checks)


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # on Python 3.13.0
@pytest.mark.parametrize("kernel", [True, False])
def test_it_compiles_as_one_graph_and_gives_the_same_bits(kernel: bool, request: pytest.FixtureRequest) -> None:
    made = request.getfixturevalue("calls") if kernel else []
    layer = BlockFP8Linear.from_linear(nn.Linear(256, 128))
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for rows in (2, 5, 8):
        x = torch.randn(rows, 256)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    assert bool(made) == kernel
    one, other = (torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    compiled(one).sum().backward()
    layer(other).sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(one.grad, other.grad)


def test_autocast_decides_the_dtype_as_for_any_linear_layer(calls: list[tuple[int, ...]]) -> None:
    layer = BlockFP8Linear.from_linear(nn.Linear(128, 300))
    x = torch.randn(3, 128, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
        with torch.no_grad():
            assert layer(x).dtype is nn.Linear(128, 300)(x).dtype is torch.bfloat16
    assert found.dtype is torch.bfloat16
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32


def test_fake_tensors_need_no_kernel(calls: list[tuple[int, ...]]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        layer = BlockFP8Linear(256, 384, dtype=torch.bfloat16)
        found = layer(torch.empty(2, 5, 256, dtype=torch.bfloat16))
    assert (found.shape, found.dtype) == ((2, 5, 384), torch.bfloat16)
    assert not calls
