"""Small random checkpoints whose greedy tokens vary: with the usual ``initializer_range`` they are one token repeated.

Run as a script, with the names of kinds after the folder to write them to.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

_SIZES = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    # SGLang's CPU path knows this kind of rotary embedding only.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
KINDS = {
    "dense": ("Llama", {}),
    "other": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "moe": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}),
    "mla": ("DeepseekV3", _MLA),
    "blocks": ("Qwen3", {"head_dim": 64, "dtype": "bfloat16"}),  # all of whose linears are whole blocks of 128 by 128
}
"""Name to the model's family in Transformers, and what its config has beyond the common sizes."""


def without(original: Path, folder: Path, *names: str) -> Path:
    """A copy of a checkpoint that lacks some tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def block_fp8(original: Path, folder: Path) -> Path:
    """A copy whose layers are float8_e4m3fn with one float32 scale for each 128 by 128 values, as DeepSeek-V3's checkpoints are."""
    from safetensors.torch import load_file, save_file

    from torchwcache.quantization.block_fp8 import quantize_block_fp8

    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if ".layers." not in name or weight.dim() != 2:
            continue
        tensors[name], tensors[f"{name}_scale_inv"] = quantize_block_fp8(weight)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((original / "config.json").read_text())
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config["quantization_config"] = {**stated, "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle(original: Path, folder: Path) -> Path:
    """A draft for a Llama, as EAGLE's are: one layer, and neither embedding nor head, which it gets from its target."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config = json.loads((original / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(original / "model.safetensors")
    layer = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    size = config["hidden_size"]
    layer |= {"fc.weight": torch.randn(size, 2 * size), "fc.bias": torch.zeros(size)}
    save_file(layer, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapter(original: Path, folder: Path, *, rank: int = 4) -> Path:
    """A random LoRA adapter for a Llama's attention and feed-forward layers, as PEFT writes them."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    random = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in load_file(original / "model.safetensors").items():
        if name.split(".")[-2] in targets:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=random) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=random) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    config = {**stated, "base_model_name_or_path": str(original), "target_modules": list(targets), "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    import torch
    import transformers

    for seed, kind in enumerate(sys.argv[2:]):
        family, more = KINDS[kind]
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**{**_SIZES, **more})
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(Path(sys.argv[1]) / kind)


if __name__ == "__main__":
    main()
