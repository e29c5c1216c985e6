"""Small random checkpoints whose greedy tokens vary: with the usual ``initializer_range`` they are one token repeated."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["KINDS", "make", "make_adapter", "with_head", "without"]

_SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
KINDS = {
    "dense": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}),
    "mla": ("DeepseekV3", _MLA),
    "small": ("Llama", {"num_hidden_layers": 1}),
}
"""Name to the model's family in Transformers, and what its config has beyond the common sizes."""


def make(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint, with a ``config.json``; returns its folder."""
    import torch
    import transformers

    family, more = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **more})
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder


def without(original: Path, folder: Path, name: str, *, zeros: bool = False) -> Path:
    """Write a copy of a checkpoint that lacks a tensor, or has zeros in its place."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(name)
    if zeros:
        tensors[name] = tensor.zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_head(original: Path, folder: Path, *, same: bool) -> Path:
    """Write a copy of a checkpoint of tied embeddings that has a head all the same: equal to the embedding, or another."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if same else embedding.flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_adapter(folder: Path) -> Path:
    """Write a LoRA adapter for the checkpoints of one layer."""
    import json

    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    tensors = {}
    for name, rows in (("q_proj", 128), ("v_proj", 64)):
        where = f"base_model.model.model.layers.0.self_attn.{name}"
        tensors[f"{where}.lora_A.weight"] = torch.randn(8, 128)
        tensors[f"{where}.lora_B.weight"] = torch.randn(rows, 8)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    if sys.argv[1] == "adapter":
        make_adapter(Path(sys.argv[2]))
    elif sys.argv[1] in ("without", "zeros"):
        without(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], zeros=sys.argv[1] == "zeros")
    elif sys.argv[1] in ("equal-head", "other-head"):
        with_head(Path(sys.argv[2]), Path(sys.argv[3]), same=sys.argv[1] == "equal-head")
    else:
        make(sys.argv[1], Path(sys.argv[2]), seed=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
