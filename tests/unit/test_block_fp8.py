"""The arithmetic of block FP8, and the modules that compute with it."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.quantization import block_fp8, block_fp8_layers
from torchwcache.quantization.block_fp8 import FLOAT8, dequantize_block_fp8, quantize_block_fp8
from torchwcache.quantization.block_fp8_layers import BlockFP8Experts, BlockFP8Linear, block_fp8_linear

B16 = (16, 16)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def one_block(*values: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.tensor([values])
    quantized, scales = quantize_block_fp8(weight, (1, len(values)))
    return quantized[0].float(), scales[0, 0], dequantize_block_fp8(quantized, scales, (1, len(values)))[0]


# ---- quantizing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "block", "grid"),
    [
        ((256, 384), (128, 128), (2, 3)),
        ((300, 200), (128, 128), (3, 2)),
        ((129, 128), (128, 128), (2, 1)),
        ((5, 7), (2, 3), (3, 3)),
        ((5, 7), (1, 1), (5, 7)),
        ((4, 40, 24), B16, (4, 3, 2)),
    ],
)
def test_shapes_and_dtypes(shape: tuple[int, ...], block: tuple[int, int], grid: tuple[int, ...]) -> None:
    weight, scales = quantize_block_fp8(torch.randn(shape), block)
    assert (weight.shape, weight.dtype, scales.shape, scales.dtype) == (shape, FLOAT8, grid, torch.float32)
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert dequantize_block_fp8(weight, scales, block, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_scaled_each_by_itself(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 40).to(dtype)
    quantized, scales = quantize_block_fp8(weight, B16)
    for i, j in ((0, 0), (2, 2), (1, 2)):  # the right and lower blocks have edges
        part = weight[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
        assert scales[i, j] == part.abs().max().float() / 448
        alone, scale = quantize_block_fp8(part, tuple(part.shape))
        assert bits(alone) == bits(quantized[16 * i : 16 * i + 16, 16 * j : 16 * j + 16])
        assert scale.item() == scales[i, j]


def test_experts_are_quantized_each_by_itself() -> None:
    weight = torch.randn(3, 40, 24)
    quantized, scales = quantize_block_fp8(weight, B16)
    for expert in range(3):
        alone, scale = quantize_block_fp8(weight[expert], B16)
        assert bits(alone) == bits(quantized[expert])
        assert torch.equal(scale, scales[expert])


def test_views_and_threads_make_no_difference() -> None:
    weight = torch.randn(96, 64)
    expected = quantize_block_fp8(weight, B16)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for same in (weight.t().contiguous().t(), torch.cat([weight, weight])[96:], nn.Parameter(weight)):
                found = quantize_block_fp8(same, B16)
                assert [bits(t) for t in found] == [bits(t) for t in expected]
                assert not found[1].requires_grad
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_gives_the_same_bits(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 300, 200).to(dtype)
    weight[0, :16] *= 1e-5
    weight[1, 3, 5], weight[1, 3, 6] = math.nan, math.inf
    expected = quantize_block_fp8(weight, B16)
    found = quantize_block_fp8(weight.cuda(), B16)
    assert torch.equal(found[1].cpu(), expected[1])
    assert torch.equal(found[0].cpu().float().nan_to_num(7), expected[0].float().nan_to_num(7))
    back = dequantize_block_fp8(*found, B16, torch.bfloat16).cpu()
    assert torch.equal(back.nan_to_num(7), dequantize_block_fp8(*expected, B16, torch.bfloat16).nan_to_num(7))


def test_little_memory_at_a_time_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(100, 72)
    expected = quantize_block_fp8(weight, B16)
    values = dequantize_block_fp8(*expected, B16)
    monkeypatch.setattr(block_fp8, "_AT_ONCE_NBYTES", 1)
    assert block_fp8.rows_at_once(72, 16) == 16
    found = quantize_block_fp8(weight, B16)
    assert [bits(t) for t in found] == [bits(t) for t in expected]
    assert torch.equal(dequantize_block_fp8(*found, B16), values)


# ---- at the edges ------------------------------------------------------------------------------------------------------------


def test_zeros_stay_zeros_with_their_signs() -> None:
    quantized, scale, back = one_block(0.0, -0.0, 0.0)
    assert scale == 1
    assert [math.copysign(1, value) for value in quantized] == [1, -1, 1]
    assert back.tolist() == [0, 0, 0]


def test_denormals_have_the_smallest_normal_scale() -> None:
    tiny = 2.0**-126
    quantized, scale, back = one_block(tiny / 2, -(tiny / 4), 2.0**-149, 0.0)
    assert scale == tiny
    assert quantized.tolist() == [0.5, -0.25, 0, 0]
    assert back.tolist() == [tiny / 2, -(tiny / 4), 0, 0]


def test_nan_and_infinities_become_nan_and_harm_nobody() -> None:
    quantized, scale, back = one_block(math.nan, math.inf, -math.inf, 2.0, -1.0)
    assert scale == torch.tensor(2.0) / 448
    assert quantized[:3].isnan().all()
    assert back[:3].isnan().all()
    assert quantized[3:].tolist() == [448, -224]
    alone, scale, _ = one_block(math.nan, math.inf)
    assert scale == 1
    assert alone.isnan().all()


def test_a_huge_outlier_costs_its_own_block_only() -> None:
    weight = torch.full((32, 32), 0.01)
    weight[3, 4] = torch.finfo(torch.float32).max
    quantized, scales = quantize_block_fp8(weight, B16)
    back = dequantize_block_fp8(quantized, scales, B16)
    assert back.isfinite().all()
    assert back[3, 4] == pytest.approx(torch.finfo(torch.float32).max, rel=1e-6)
    assert back[:16, :16].count_nonzero() == 1
    assert back[16:].sub(0.01).abs().max() < 1e-8
    limit = torch.finfo(torch.float32).max / 448 / 1024
    kept = one_block(torch.finfo(torch.float32).max, limit * 1.001, limit * 0.999)[0]
    assert kept.tolist() == [448, 2.0**-9, 0]


def test_largest_values_do_not_overflow() -> None:
    for largest in (1.0, 447.9999, 448.0, 3.3, 1e-30, 3.4e38, 65504.0):
        quantized, _, back = one_block(largest, -largest)
        assert quantized.tolist() == [448, -448]
        assert back[0].item() == pytest.approx(largest, rel=1e-6)


def test_scales_in_bfloat16_are_what_the_weights_are_divided_by() -> None:
    weight = torch.randn(32, 32)
    quantized, scales = quantize_block_fp8(weight, B16, torch.bfloat16)
    assert scales.dtype is torch.bfloat16
    scale = scales.float().repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert bits(quantized) == bits((weight / scale).clamp(-448, 448).to(FLOAT8))
    assert torch.equal(dequantize_block_fp8(quantized, scales, B16), quantized.float() * scale)


BAD: list[tuple[Any, ...]] = [
    (torch.ones(4, 4), (0, 4)),
    (torch.ones(4, 4), (4, -1)),
    (torch.ones(4, 4), (4,)),
    (torch.ones(4, 4), 4),
    (torch.ones(4, 4), (4.0, 4)),
    (torch.ones(4, 4), (True, 4)),
    (torch.ones(4, 4), (5, 4)),
    (torch.ones(4, 4), (4, 5)),
    (torch.ones(2, 4, 4), (5, 4)),
    (torch.ones(4), (4, 4)),
    (torch.ones(1, 2, 4, 4), (4, 4)),
    (torch.ones(0, 4), (1, 1)),
]


@pytest.mark.parametrize(("weight", "block"), BAD)
def test_bad_blocks_and_shapes_are_refused(weight: torch.Tensor, block: Any) -> None:
    with pytest.raises(ValueError, match=r"block|weight"):
        quantize_block_fp8(weight, block)
    with pytest.raises(ValueError, match=r"block|weight"):
        dequantize_block_fp8(weight.to(FLOAT8), torch.ones(1, 1), block)


def test_bad_dtypes_and_scales_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        quantize_block_fp8(torch.ones(4, 4, dtype=torch.float64), (2, 2))
    with pytest.raises(TypeError, match="float16"):
        quantize_block_fp8(torch.ones(4, 4), (2, 2), torch.float16)
    with pytest.raises(TypeError, match="cannot dequantize"):
        dequantize_block_fp8(torch.ones(4, 4), torch.ones(2, 2), (2, 2))
    with pytest.raises(ValueError, match=r"needs scales of \(2, 4\), not \(4, 2\)"):
        dequantize_block_fp8(torch.ones(4, 8).to(FLOAT8), torch.ones(4, 2), (2, 2))


# ---- against Transformers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def theirs() -> Any:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=B16, scale_fmt="float"))
    return SimpleNamespace(quantize=fp8.Fp8Quantize(quantizer), dequantize=fp8.Fp8Dequantize(quantizer), linear=fp8.FP8Linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 48), (3, 32, 16)])
def test_dequantizing_is_bit_for_bit_theirs(theirs: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, scales = quantize_block_fp8(torch.randn(shape), B16)
    expected = theirs.dequantize._dequantize_one(weight, scales, dtype)
    assert bits(dequantize_block_fp8(weight, scales, B16, dtype)) == bits(expected)


def test_quantizing_differs_from_theirs_in_the_last_bit_only(theirs: Any) -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    ours, scales = quantize_block_fp8(weight, B16)
    found = theirs.quantize._quantize_one("w.weight", weight)
    ratio = found["w.weight_scale_inv"] / scales
    assert ratio.sub(1).abs().max() <= 2**-22
    differing = found["w.weight"].float() != ours.float()
    assert differing.float().mean() < 1e-4
    assert "w.weight_scale_inv" not in theirs.quantize._quantize_one("w.weight", torch.randn(20, 20))  # edges: left as they are


def test_the_layer_has_the_same_tensors_as_theirs(theirs: Any) -> None:
    one = BlockFP8Linear(40, 24, bias=True, block_size=B16)
    other = theirs.linear(40, 24, block_size=B16, has_bias=True)
    facts = {name: (tuple(p.shape), p.dtype) for name, p in one.named_parameters()}
    assert facts == {name: (tuple(p.shape), p.dtype) for name, p in other.named_parameters()}


# ---- layers ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_a_layer_computes_with_the_dequantized_weight(
    dtype: torch.dtype, bias: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fp8, "_AT_ONCE_NBYTES", at_once)
    linear = nn.Linear(72, 100, bias=bias, dtype=dtype)
    layer = BlockFP8Linear.from_linear(linear, B16)
    x = torch.randn(2, 3, 72, dtype=dtype)
    expected = nn.functional.linear(x, layer.dequantized(dtype), layer.bias)
    found = layer(x)
    assert (found.dtype, found.shape) == (dtype, (2, 3, 100))
    torch.testing.assert_close(found, expected)
    allowed = x.abs().float() @ (linear.weight.float().abs().max() / 448 * 16).expand(72, 100) + 0.05
    assert (found.float() - linear(x).float()).abs().le(allowed).all()


def test_a_layer_never_dequantizes_a_large_matrix_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_fp8, "_AT_ONCE_NBYTES", 4 * 64 * 32)
    largest = 0
    original = block_fp8_layers.dequantized_rows

    def watched(*args: Any) -> torch.Tensor:
        nonlocal largest
        rows = original(*args)
        largest = max(largest, rows.shape[0])
        return rows

    monkeypatch.setattr(block_fp8_layers, "dequantized_rows", watched)
    BlockFP8Linear(64, 200, block_size=B16)(torch.randn(1, 64))
    assert largest == 32


def test_gradients_reach_the_input() -> None:
    layer = BlockFP8Linear.from_linear(nn.Linear(32, 48), B16)
    x = torch.randn(4, 32, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(4, 32))
    assert layer.weight.grad is None


def test_a_layer_on_meta_is_the_layer_without_its_values() -> None:
    linear = nn.Linear(40, 24, dtype=torch.bfloat16).eval()
    real, meta = BlockFP8Linear.from_linear(linear, B16), BlockFP8Linear.from_linear(copy.deepcopy(linear).to("meta"), B16)
    assert all(parameter.is_meta for parameter in meta.parameters())
    facts = [(name, p.shape, p.dtype, p.requires_grad) for name, p in real.named_parameters()]
    assert facts == [(name, p.shape, p.dtype, p.requires_grad) for name, p in meta.named_parameters()]
    assert not meta.training
    assert repr(meta) == repr(real)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.bfloat16(), lambda m: m.float()])
def test_casting_a_model_leaves_float8_weights_alone(cast: Any) -> None:
    tree = nn.Sequential(BlockFP8Linear.from_linear(nn.Linear(16, 16), B16), nn.Linear(4, 4))
    before = bits(tree[0].weight), bits(tree[0].weight_scale_inv)
    cast(tree)
    assert (bits(tree[0].weight), bits(tree[0].weight_scale_inv)) == before
    assert tree[0].weight_scale_inv.dtype is torch.float32
    assert tree[0].bias.dtype is tree[1].weight.dtype
    assert tree.to("meta")[0].weight.is_meta
    assert tree.to_empty(device="cpu")[0].weight.dtype is FLOAT8


def test_state_dict_round_trip() -> None:
    layer = BlockFP8Linear.from_linear(nn.Linear(40, 24), B16)
    other = BlockFP8Linear(40, 24, block_size=B16)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 40)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("block", [(0, 16), (16, 64), (64, 16), (16, -16), 16])
def test_layers_with_impossible_blocks_are_refused(block: Any) -> None:
    with pytest.raises(ValueError, match="block"):
        BlockFP8Linear(32, 32, block_size=block)
    with pytest.raises(ValueError, match="block"):
        BlockFP8Experts(2, 32, 32, nn.SiLU(), block_size=block)


# ---- experts -----------------------------------------------------------------------------------------------------------------


def filled_experts(gate_up: torch.Tensor, down: torch.Tensor, block: tuple[int, int] = B16) -> BlockFP8Experts:
    experts = BlockFP8Experts(gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // 2, nn.SiLU(), block_size=block)
    weights, scales = BlockFP8Experts.quantize_gate_up(gate_up, block)
    values = {"gate_up_proj": weights, "gate_up_proj_scale_inv": scales}
    values["down_proj"], values["down_proj_scale_inv"] = quantize_block_fp8(down, block)
    experts.load_state_dict(values)
    return experts


@pytest.mark.parametrize("intermediate", [32, 24])
def test_gate_and_up_are_quantized_as_a_checkpoint_holds_them(intermediate: int) -> None:
    fused = torch.randn(3, 2 * intermediate, 40)
    weights, scales = BlockFP8Experts.quantize_gate_up(fused, B16)
    for part in range(2):
        alone, scale = quantize_block_fp8(fused[:, part * intermediate :][:, :intermediate], B16)
        assert bits(weights.chunk(2, 1)[part]) == bits(alone)
        assert torch.equal(scales.chunk(2, 1)[part], scale)
    assert scales.shape == BlockFP8Experts(3, 40, intermediate, nn.SiLU(), block_size=B16).gate_up_proj_scale_inv.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_what_transformers_computes_with_dequantized_weights(dtype: torch.dtype) -> None:
    moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = pytest.importorskip("transformers").Qwen3MoeConfig(
        num_experts=4, hidden_size=40, moe_intermediate_size=24, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    reference = moe.Qwen3MoeExperts(config).to(dtype)
    ours = filled_experts(torch.randn(4, 48, 40) / 6, torch.randn(4, 40, 24) / 5)
    halves = zip(ours.gate_up_proj.chunk(2, 1), ours.gate_up_proj_scale_inv.chunk(2, 1), strict=True)
    with torch.no_grad():
        reference.gate_up_proj.copy_(torch.cat([dequantize_block_fp8(w, s, B16, dtype) for w, s in halves], dim=1))
        reference.down_proj.copy_(dequantize_block_fp8(ours.down_proj, ours.down_proj_scale_inv, B16, dtype))
        states, weights = torch.randn(7, 40, dtype=dtype), torch.rand(7, 2, dtype=dtype)
        index = torch.stack([torch.arange(7) % 3, torch.full((7,), 3)], dim=1)
        index[5, 1] = 4  # nobody: another rank's
        found, expected = ours(states, index, weights), reference(states, index, weights)
    assert found.dtype is dtype
    torch.testing.assert_close(
        found, expected, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2 if dtype is torch.bfloat16 else 1e-5
    )
    assert torch.equal(found, ours(states, index, weights))


def test_casting_leaves_experts_alone() -> None:
    experts = filled_experts(torch.randn(2, 32, 16), torch.randn(2, 16, 16)).half()
    assert {p.dtype for p in experts.parameters()} == {FLOAT8, torch.float32}


def test_the_multiplication_is_one_function() -> None:
    x, (weight, scales) = torch.randn(2, 32), quantize_block_fp8(torch.randn(48, 32), B16)
    layer = BlockFP8Linear(32, 48, bias=False, block_size=B16)
    layer.load_state_dict({"weight": weight, "weight_scale_inv": scales})
    assert torch.equal(layer(x), block_fp8_linear(x, weight, scales, B16, None))
