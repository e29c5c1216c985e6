"""Small models in block FP8, on disk as DeepSeek-V3 and Qwen3 checkpoints are, and plain modules for the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from torchwcache.quantization.block_fp8 import dequantize_block_fp8, quantize_block_fp8
from torchwcache.quantization.block_fp8_layers import BlockFP8Linear

TEXT = {"num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {**TEXT, "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
WIDE = {**TEXT, "hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 32}
BLOCKS = {"qwen3": (16, 16), "qwen3_wide": (128, 128), "qwen3_moe": (16, 16), "deepseek_v3": (16, 16)}
"""No size is a multiple of its block: every grid has edges, but for the experts'."""


def make_model(kind: str) -> Any:
    """A model with random weights in bfloat16."""
    import transformers as hf

    torch.manual_seed(len(kind))
    match kind:
        case "qwen3":
            model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL))
        case "qwen3_even":  # what Transformers can dequantize by itself
            model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**SMALL, "intermediate_size": 64}))
        case "qwen3_wide":
            model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**WIDE))
        case "qwen3_moe":
            sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **sizes))
        case "deepseek_v3":
            sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
            heads = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
            rest = {**SMALL, "num_key_value_heads": 4, "first_k_dense_replace": 1}
            del rest["head_dim"]
            model = hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**rest, **sizes, **heads))
    for parameter in model.parameters():  # biases and norms too: a model of zeros hides mistakes
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model.to(torch.bfloat16)


def is_quantized(name: str) -> bool:
    """Whether real checkpoints of these models have this tensor in float8."""
    return name.endswith(("proj.weight", "_a_proj_with_mqa.weight", "_b_proj.weight"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change ``config.json``; ``None`` takes a key away."""
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def quantize_folder(folder: Path, block: tuple[int, int], scale_name: str = "_scale_inv") -> None:
    """Turn a bfloat16 checkpoint into an FP8 one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if is_quantized(name):
            tensors[name], tensors[name + scale_name] = quantize_block_fp8(tensor, block)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stated = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    edit_config(folder, quantization_config=stated)


def dequantize_folder(folder: Path, block: tuple[int, int]) -> None:
    """And back, with what quantizing costs left in the weights."""
    tensors = load_file(folder / "model.safetensors")
    plain = {
        name: dequantize_block_fp8(tensor, tensors[f"{name}_scale_inv"], block, torch.bfloat16) if is_quantized(name) else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=None)


class Tower(nn.Module):
    """Plain layers of every kind that quantizing at load must tell apart."""

    def __init__(self, width: int = 40, linear: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.up = linear(width, 72)
        self.down = linear(72, width, bias=False)
        self.again = self.down  # one layer in two places
        self.small = nn.Linear(width, 8)
        self.back = nn.Linear(8, width)
        self.tied = nn.Linear(width, 64, bias=False)
        self.tied.weight = self.embed.weight
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.score = nn.Linear(width, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.again(self.up(x).relu())
        x = x + self.back(self.small(x)) + self.attention(x, x, x)[0]
        return torch.cat([self.score(x), self.tied(x)], dim=-1)

    def example_inputs(self) -> dict[str, torch.Tensor]:
        return {"ids": torch.arange(24).reshape(2, 12) % 64}


class QuantizedTower(Tower):
    """The same, built for a checkpoint that is quantized."""

    def __init__(self, width: int = 40) -> None:
        super().__init__(width)
        self.up = BlockFP8Linear(width, 72, block_size=(16, 16))
        self.down = self.again = BlockFP8Linear(72, width, bias=False, block_size=(16, 16))
