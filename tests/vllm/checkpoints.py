"""Small random checkpoints whose greedy tokens vary: with the usual ``initializer_range`` they are one token repeated."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["KINDS", "make"]

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


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), seed=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
