"""Block FP8 by the tensor cores: against float64, and in every way that a module is run on a GPU.

``tests/unit/test_block_fp8_kernel.py`` tests what is around the kernel without a GPU.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchwcache.quantization import block_fp8_kernel, block_fp8_layers
from torchwcache.quantization.block_fp8 import BLOCK, dequantize_block_fp8, quantize_block_fp8
from torchwcache.quantization.block_fp8_layers import BlockFP8Experts, BlockFP8Linear, block_fp8_linear

pytestmark = pytest.mark.gpu

INPUT_BOUND = 2.0**-4
"""Rounding to float8_e4m3fn moves a number by at most 2**-4 of itself, so the input as a whole, by norm, by at most that; errors of
independent signs carry the ratio over to the product. A wrong scale is an error of the order of 1."""
BOTH_BOUND = 2 * INPUT_BOUND + INPUT_BOUND**2
"""Against the weight before it was quantized."""
ROUNDING_BOUND = 2.0**-7
"""What accumulating and rounding to bfloat16 leave, where nothing is quantized in between."""
SHAPES = [(128, 128), (384, 640), (256, 1152), (640, 512), (576, 768)]
"""In blocks along the columns: 1, 5, 9 (not multiples of four), 4 and 6; the last has half a block of rows at its edge."""


def hopper() -> bool:
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return torch.cuda.get_device_capability() == (9, 0) and version >= (12, 9) and hasattr(F, "scaled_mm")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of every multiplication by the kernel."""
    if not hopper():
        pytest.skip("needs compute capability 9.0, CUDA 12.9 and torch.nn.functional.scaled_mm")
    made: list[tuple[int, ...]] = []
    real = block_fp8_kernel._scaled_mm

    def counted(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        made.append((*a.shape, b.shape[1]))
        return real(a, b, *rest)

    monkeypatch.setattr(block_fp8_kernel, "_scaled_mm", counted)
    return made


def make_weight(out: int, inner: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, and the same quantized. Neighbouring blocks differ in magnitude, so that no scale can stand in for another."""
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-out // 128), -(-inner // 128))
    spread = torch.exp2(torch.randint(-3, 4, grid, generator=generator).float())
    spread = spread.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out, :inner]
    weight = (torch.randn(out, inner, generator=generator) * spread).cuda()
    return weight, *quantize_block_fp8(weight)


def make_input(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).cuda().to(dtype)


def exactly(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return x.double() @ dequantize_block_fp8(weight, scales, BLOCK, torch.float64).t()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_a_hopper_uses_the_kernel_and_nothing_else_does() -> None:
    assert (block_fp8_kernel.refusal_of_device(torch.device("cuda:0")) is None) == hopper()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 128, 1000])
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_the_error_is_what_float8_allows(out: int, inner: int, rows: int, dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    original, weight, scales = make_weight(out, inner)
    x, bias = make_input(rows, inner, dtype=dtype), make_input(out, dtype=dtype)
    kept = [tensor.clone() for tensor in (x, weight.view(torch.uint8), scales)]
    found = block_fp8_linear(x, weight, scales, BLOCK, bias)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, out), dtype, True)
    assert calls == [(rows + -rows % 4, inner, out // 128 * 128)]
    expected = exactly(x, weight, scales) + bias.double()
    assert 0 < error(found, expected) <= INPUT_BOUND
    assert error(found, x.double() @ original.double().t() + bias.double()) <= BOTH_BOUND
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, weight.view(torch.uint8), scales), strict=True))
    assert error(block_fp8_layers._dequantizing(x, weight, scales, BLOCK, bias), expected) <= ROUNDING_BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("out", "inner"), [(384, 640), (4096, 4096), (256, 16384)])
def test_the_kernel_multiplies_what_it_is_given(out: int, inner: int, dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(out, inner)
    x = make_input(64, inner, dtype=dtype)
    quantized, scale = block_fp8_kernel.quantize_activation(x)
    same = quantized.double() * scale.double().repeat_interleave(128, 1)
    assert error(block_fp8_linear(x, weight, scales, BLOCK), exactly(same, weight, scales)) <= ROUNDING_BOUND


def test_the_input_is_quantized_as_on_a_cpu() -> None:
    x = make_input(33, 640)
    x[3], x[4, 128:256] = 0, 2.0**-130
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        ours, theirs = (block_fp8_kernel.quantize_activation(t) for t in (x.to(dtype), x.to(dtype).cpu()))
        assert torch.equal(ours[0].cpu().view(torch.uint8), theirs[0].view(torch.uint8))
        assert torch.equal(ours[1].cpu(), theirs[1])
        assert ours[1].stride() == theirs[1].stride()


MUTATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shifted along the columns": lambda s: s.roll(1, 1),
    "shifted along the rows": lambda s: s.roll(1, 0),
    "two swapped": lambda s: s[:, [1, 0, *range(2, s.shape[1])]],
    "transposed": lambda s: s.t(),
    "not padded": lambda s: torch.cat([s.flatten(), s.new_zeros(15)]).as_strided(s.shape, (8, 1)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_scales_are_seen(mutation: str, calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is no guard unless a wrong layout breaks it."""
    _, weight, scales = make_weight(640, 640)
    x = make_input(16, 640)
    expected = exactly(x, weight, scales)
    assert error(block_fp8_linear(x, weight, scales, BLOCK), expected) <= INPUT_BOUND
    right = block_fp8_kernel.scales_for_kernel
    monkeypatch.setattr(block_fp8_kernel, "scales_for_kernel", lambda s: right(MUTATIONS[mutation](s)))
    assert error(block_fp8_linear(x, weight, scales, BLOCK), expected) > 4 * BOTH_BOUND
    assert len(calls) == 2


def test_a_bad_row_harms_no_other(calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(256, 640)
    x = make_input(8, 640)
    x[5] = 0
    clean = block_fp8_linear(x, weight, scales, BLOCK)
    assert clean[5].count_nonzero() == 0
    x[1, 3], x[2, 130] = torch.nan, torch.inf
    found = block_fp8_linear(x, weight, scales, BLOCK)
    assert found[1:3].isnan().all()
    assert torch.equal(found[3:], clean[3:])
    assert torch.equal(found[0], clean[0])


@pytest.mark.parametrize(
    ("out", "inner", "block"),
    [(256, 200, BLOCK), (256, 144, BLOCK), (256, 256, (64, 64)), (256, 256, (64, 128)), (128, 130, BLOCK)],
)
def test_what_the_kernel_does_not_take_is_dequantized(
    out: int, inner: int, block: tuple[int, int], calls: list[tuple[int, ...]]
) -> None:
    weight, scales = quantize_block_fp8(torch.randn(out, inner, device="cuda"), block)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = make_input(5, inner, dtype=dtype)
        expected = x.double() @ dequantize_block_fp8(weight, scales, block, torch.float64).t()
        assert error(block_fp8_linear(x, weight, scales, block), expected) <= ROUNDING_BOUND
    assert not calls


def test_no_rows_odd_addresses_and_float64_are_dequantized(calls: list[tuple[int, ...]]) -> None:
    _, weight, scales = make_weight(256, 128)
    assert block_fp8_linear(make_input(0, 128), weight, scales, BLOCK).shape == (0, 256)
    odd = torch.empty(weight.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(weight.dtype).view(weight.shape).copy_(weight)
    for x, moved in ((make_input(5, 128), odd), (make_input(5, 128, dtype=torch.float64), weight)):
        assert error(block_fp8_linear(x, moved, scales, BLOCK), exactly(x, weight, scales)) <= ROUNDING_BOUND
    assert not calls


def test_the_switch_leaves_the_kernel_unused(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    caches = (block_fp8_kernel._refusal_of_device, block_fp8_kernel.refusal)
    monkeypatch.setenv(block_fp8_kernel.SWITCH, "dequantize")
    _, weight, scales = make_weight(256, 256)
    x = make_input(4, 256)
    try:
        for cache in caches:
            cache.cache_clear()
        found = block_fp8_linear(x, weight, scales, BLOCK)
    finally:
        for cache in caches:
            cache.cache_clear()
    assert torch.equal(found, block_fp8_layers._dequantizing(x, weight, scales, BLOCK, None))
    assert not calls


# ---- how it is run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_it_can_be_captured(rows: int, calls: list[tuple[int, ...]]) -> None:
    layer = BlockFP8Linear.from_linear(nn.Linear(640, 576, device="cuda", dtype=torch.bfloat16)).requires_grad_(False)
    x = make_input(rows, 640)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x)
    for factor in (1.0, -3.0, 0.0):
        x.mul_(factor)
        graph.replay()
        assert torch.equal(found, layer(x))
    assert calls


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_it_never_waits_for_the_gpu_and_never_copies_the_weight(calls: list[tuple[int, ...]]) -> None:
    x = make_input(7, 4224)  # 33 blocks: the scales are padded
    peaks = []
    for out in (4096, 16384):
        layer = BlockFP8Linear(4224, out, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
        layer(x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert len(calls) == 4
    assert peaks[1] - peaks[0] < (16384 - 4096) * 4224 / 16  # cuBLAS may have a workspace, but it does not grow with the weight


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_as_one_graph_and_gives_the_same_bits(backend: str, calls: list[tuple[int, ...]]) -> None:
    if backend == "inductor" and not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("inductor needs a C compiler")
    tree = nn.Sequential(
        BlockFP8Linear.from_linear(nn.Linear(640, 576, device="cuda", dtype=torch.bfloat16)),
        BlockFP8Linear.from_linear(nn.Linear(576, 256, device="cuda", dtype=torch.bfloat16)),  # columns that are not whole blocks
    )
    torch.compiler.reset()
    compiled = torch.compile(tree, fullgraph=True, backend=backend)
    for rows in (4, 7, 9):
        with torch.no_grad():
            assert torch.equal(compiled(make_input(rows, 640)), tree(make_input(rows, 640)))
    x = make_input(4, 640).requires_grad_()
    other = make_input(4, 640).requires_grad_()
    compiled(x).sum().backward()
    tree(other).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_those_of_the_dequantized_weight(dtype: torch.dtype, calls: list[tuple[int, ...]]) -> None:
    layer = BlockFP8Linear.from_linear(nn.Linear(640, 576, device="cuda", dtype=dtype))
    x = make_input(2, 5, 640, dtype=dtype).requires_grad_()
    found = layer(x)
    with torch.no_grad():
        assert torch.equal(found, layer(x))
    gradient = make_input(2, 5, 576, dtype=dtype)
    found.backward(gradient)
    assert x.grad is not None
    assert error(x.grad, gradient.double() @ layer.dequantized(torch.float64)) <= ROUNDING_BOUND
    assert layer.bias is not None
    assert layer.bias.grad is not None
    assert error(layer.bias.grad, gradient.double().sum((0, 1))) <= ROUNDING_BOUND
    assert layer.weight.grad is None
    assert len(calls) == 2


def test_autocast_decides_the_dtype(calls: list[tuple[int, ...]]) -> None:
    layer = BlockFP8Linear.from_linear(nn.Linear(256, 300, device="cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(make_input(3, 256, dtype=torch.float32)).dtype is torch.bfloat16
    assert calls


@pytest.mark.parametrize(("hidden", "intermediate", "by_kernel"), [(640, 256, True), (256, 192, False)])
def test_experts(hidden: int, intermediate: int, by_kernel: bool, calls: list[tuple[int, ...]]) -> None:
    gate_up = torch.randn(4, 2 * intermediate, hidden, device="cuda") / hidden**0.5
    down = torch.randn(4, hidden, intermediate, device="cuda") / intermediate**0.5
    experts = BlockFP8Experts(4, hidden, intermediate, nn.SiLU(), device="cuda")
    weights, scales = BlockFP8Experts.quantize_gate_up(gate_up, BLOCK)
    values = {"gate_up_proj": weights, "gate_up_proj_scale_inv": scales}
    values["down_proj"], values["down_proj_scale_inv"] = quantize_block_fp8(down)
    experts.load_state_dict(values)
    states, top = make_input(9, hidden), torch.rand(9, 2, device="cuda").bfloat16()
    index = torch.stack([torch.arange(9) % 3, torch.full((9,), 3)], dim=1).cuda()
    expected = torch.zeros(9, hidden, dtype=torch.float64, device="cuda")
    for token in range(9):
        for place in range(2):
            expert = int(index[token, place])
            gate, up = (states[token].double() @ gate_up[expert].double().t()).chunk(2)
            expected[token] += (F.silu(gate) * up) @ down[expert].double().t() * top[token, place].double()
    found = experts(states, index, top)
    assert found.dtype is torch.bfloat16
    # Two multiplications one after the other, each within the bound.
    assert error(found, expected) <= 2 * BOTH_BOUND
    assert torch.equal(found, experts(states, index, top))
    # Gate and up have rows at the edge (192 is one block and a half) and whole columns; down has columns at the edge.
    assert len(calls) == 2 * (4 * 3 if by_kernel else 4 * 2)


HASHED = """
import hashlib, torch
from torchwcache.quantization.block_fp8 import quantize_block_fp8
from torchwcache.quantization.block_fp8_layers import block_fp8_linear
g = torch.Generator().manual_seed(5)
weight, scales = quantize_block_fp8(torch.randn(1024, 2176, generator=g).cuda())
for rows in (1, 7, 256):
    x = torch.randn(rows, 2176, generator=g).cuda().bfloat16()
    found = block_fp8_linear(x, weight, scales, (128, 128))
    print(hashlib.sha256(found.view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
"""


def test_every_process_computes_the_same_bits(calls: list[tuple[int, ...]]) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, scales = quantize_block_fp8(torch.randn(1024, 2176, generator=generator).cuda())
    here = []
    for rows in (1, 7, 256):
        x = torch.randn(rows, 2176, generator=generator).cuda().bfloat16()
        found = [block_fp8_linear(x, weight, scales, BLOCK) for _ in range(5)]
        assert all(torch.equal(one, found[0]) for one in found)
        here.append(hashlib.sha256(found[0].view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
    there = subprocess.run([sys.executable, "-c", HASHED], capture_output=True, text=True, timeout=200, check=True)
    assert there.stdout.split() == here
    assert calls
