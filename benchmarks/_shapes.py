"""Mixture-of-experts models by their shapes: the dimensions of large published models, in block FP8, at any width.

Only the shapes are theirs. Attention is plain softmax attention without rotary embeddings: what matters here is how many tensors
there are, how large they are, and how they are named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from torchwcache.quantization.block_fp8_layers import BlockFP8Experts, BlockFP8Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    moe_intermediate: int
    vocabulary: int
    dense_layers: int = 0
    dense_intermediate: int = 0
    shared_experts: int = 0
    top_k: int = 8
    block: tuple[int, int] = (128, 128)
    fused: bool = True


QWEN3_235B = Shape(
    name="Qwen3-235B-A22B", hidden=4096, layers=94, heads=64, kv_heads=4, head_dim=128, experts=128, moe_intermediate=1536,
    vocabulary=151936,
)  # fmt: skip
"""As its config.json states."""

LING_1T = Shape(
    name="Ling-2.6-1T-like", hidden=8192, layers=80, heads=64, kv_heads=8, head_dim=128, experts=256, moe_intermediate=2048,
    vocabulary=157184, dense_layers=4, dense_intermediate=18432, shared_experts=1,
)  # fmt: skip
"""Like the family's 1T model; the dimensions were not checked against a published config."""


def toy(shape: Shape) -> Shape:
    """The same model at toy width: everything divided, blocks included, ragged edges kept."""
    return replace(
        shape, hidden=64, layers=2 + bool(shape.dense_layers), heads=4, kv_heads=2, head_dim=16, experts=4, moe_intermediate=24,
        vocabulary=50, dense_layers=min(shape.dense_layers, 1), dense_intermediate=40 if shape.dense_layers else 0, top_k=2,
        block=(16, 16),
    )  # fmt: skip


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = (shape.heads, shape.kv_heads, shape.head_dim)
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = BlockFP8Linear(shape.hidden, width, bias=False, block_size=shape.block)
        self.k_proj = BlockFP8Linear(shape.hidden, kv_width, bias=False, block_size=shape.block)
        self.v_proj = BlockFP8Linear(shape.hidden, kv_width, bias=False, block_size=shape.block)
        self.o_proj = BlockFP8Linear(width, shape.hidden, bias=False, block_size=shape.block)
        self.q_norm, self.k_norm = Norm(shape.head_dim), Norm(shape.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, head_dim = self.shape
        q = self.q_norm(self.q_proj(x).unflatten(-1, (heads, head_dim))).transpose(-2, -3)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (kv_heads, head_dim))).transpose(-2, -3)
        v = self.v_proj(x).unflatten(-1, (kv_heads, head_dim)).transpose(-2, -3)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(mixed.transpose(-2, -3).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int, block: tuple[int, int]) -> None:
        super().__init__()
        self.gate_proj = BlockFP8Linear(hidden, intermediate, bias=False, block_size=block)
        self.up_proj = BlockFP8Linear(hidden, intermediate, bias=False, block_size=block)
        self.down_proj = BlockFP8Linear(intermediate, hidden, bias=False, block_size=block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """Routed experts, fused into one tensor each or one module each, and shared ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Parameter(torch.zeros(shape.experts, shape.hidden, dtype=torch.bfloat16))
        self.experts: nn.Module
        if shape.fused:
            self.experts = BlockFP8Experts(
                shape.experts, shape.hidden, shape.moe_intermediate, nn.functional.silu, block_size=shape.block
            )
        else:
            self.experts = nn.ModuleList(MLP(shape.hidden, shape.moe_intermediate, shape.block) for _ in range(shape.experts))
        width = shape.moe_intermediate * shape.shared_experts
        self.shared = MLP(shape.hidden, width, shape.block) if width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, index = (tokens @ self.router.t()).float().softmax(-1).topk(self.top_k)
        if isinstance(self.experts, BlockFP8Experts):
            out = self.experts(tokens, index, weights)
        else:
            out = torch.zeros_like(tokens)
            for number, expert in enumerate(self.experts):
                rows, position = torch.where(index == number)
                out.index_add_(0, rows, (expert(tokens[rows]) * weights[rows, position, None]).to(out.dtype))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(shape.hidden), Norm(shape.hidden)
        self.attention = Attention(shape)
        dense = number < shape.dense_layers
        self.mlp = MLP(shape.hidden, shape.dense_intermediate, shape.block) if dense else Mixture(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A decoder of these shapes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer(shape, number) for number in range(shape.layers))
        self.norm = Norm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def toy_qwen_fused() -> Model:
    return Model(toy(QWEN3_235B))


def toy_qwen_unfused() -> Model:
    return Model(replace(toy(QWEN3_235B), fused=False))


def toy_ling_fused() -> Model:
    return Model(toy(LING_1T))


def toy_ling_unfused() -> Model:
    return Model(replace(toy(LING_1T), fused=False))
