"""Checkpoints for the engine benchmarks: a Qwen3 with random weights in bf16 or block-wise FP8, and a large one without contents.

``python benchmarks/_engine_checkpoints.py KIND FOLDER DEVICE GIB`` prints how many bytes of weights it wrote.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GIB = 1 << 30
BLOCK = 128
SMALL = {"hidden": 256, "intermediate": 512, "vocabulary": 1024, "heads": 4, "head": 128}
USUAL = {"hidden": 2560, "intermediate": 9728, "vocabulary": 151936, "heads": 32, "head": 128}
LARGE = {"hidden": 8192, "intermediate": 28672, "vocabulary": 32768, "heads": 64, "head": 128}
SHARD_NBYTES = 2 * GIB


def shapes(size: dict[str, int], layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters of a Qwen3, as its checkpoints have them."""
    hidden, intermediate, head = size["hidden"], size["intermediate"], size["head"]
    heads, kv = size["heads"] * head, size["heads"] // 4 * head
    yield "model.embed_tokens.weight", (size["vocabulary"], hidden)
    for number in range(layers):
        layer = f"model.layers.{number}."
        yield from ((layer + f"{name}.weight", (hidden,)) for name in ("input_layernorm", "post_attention_layernorm"))
        yield from ((layer + f"self_attn.{name}.weight", (head,)) for name in ("q_norm", "k_norm"))
        yield from ((layer + f"self_attn.{name}.weight", (rows, hidden)) for name, rows in (("q_proj", heads), ("k_proj", kv)))
        yield layer + "self_attn.v_proj.weight", (kv, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, heads)
        yield from ((layer + f"mlp.{name}.weight", (intermediate, hidden)) for name in ("gate_proj", "up_proj"))
        yield layer + "mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (size["vocabulary"], hidden)


def config_of(size: dict[str, int], layers: int, *, fp8: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": size["head"],
        "hidden_act": "silu",
        "hidden_size": size["hidden"],
        "intermediate_size": size["intermediate"],
        "max_position_embeddings": 4096,
        "num_attention_heads": size["heads"],
        "num_hidden_layers": layers,
        "num_key_value_heads": size["heads"] // 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": size["vocabulary"],
    }
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }
    return config


def layers_for(size: dict[str, int], nbytes: int, itemsize: int) -> int:
    """How many layers make up so many bytes, together with the embeddings, which stay in bfloat16."""
    outside = 2 * sum(rows[0] * rows[1] for name, rows in shapes(size, 0) if len(rows) == 2)
    layer = itemsize * sum(rows[0] * rows[1] for name, rows in shapes(size, 1) if "layers" in name and len(rows) == 2)
    return max(1, -(-(nbytes - outside) // layer))


def describe(folder: Path, index: dict[str, str], nbytes: int, config: dict[str, Any]) -> None:
    """Write what lies beside the files of weights."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": nbytes}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write(folder: Path, device: str, gib: float, *, fp8: bool) -> int:
    """With random contents, wide enough that greedy tokens vary."""
    import torch
    from safetensors.torch import save_file

    from torchwcache.quantization.block_fp8 import quantize_block_fp8

    size = USUAL if gib >= 1 else SMALL
    layers = layers_for(size, int(gib * GIB), 1 if fp8 else 2)
    generator = torch.Generator(device).manual_seed(0)
    std = 1.7 / size["hidden"] ** 0.5
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    files = total = 0

    def flush() -> None:
        nonlocal files, total
        if shard:
            files += 1
            name = f"model-{files:05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            index.update(dict.fromkeys(shard, name))
            total += sum(tensor.nbytes for tensor in shard.values())
            shard.clear()

    for name, shape in shapes(size, layers):
        if len(shape) == 1:
            shard[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=std, generator=generator)
        if fp8 and "layers" in name:
            weight, scale = quantize_block_fp8(weight, (BLOCK, BLOCK))
            shard[f"{name}_scale_inv"] = scale.cpu()
        shard[name] = weight.cpu()
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_NBYTES:
            flush()
    flush()
    describe(folder, index, total, config_of(size, layers, fp8=fp8))
    return total


def write_empty(folder: Path, gib: float) -> int:
    """A checkpoint of zeros that takes no room on the disk: a header, and a hole behind it. For sizes, not for tokens."""
    size = LARGE if gib >= 8 else SMALL
    layers = layers_for(size, int(gib * GIB), 2)
    index: dict[str, str] = {}
    header: dict[str, Any] = {}
    files = total = at = 0

    def flush() -> None:
        nonlocal files, total, at
        if header:
            files += 1
            name = f"model-{files:05d}.safetensors"
            text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
            text += b" " * (-len(text) % 8)
            with (folder / name).open("wb") as out:
                out.write(struct.pack("<Q", len(text)) + text)
                out.truncate(8 + len(text) + at)
            index.update(dict.fromkeys(header, name))
            total += at
            header.clear()
            at = 0

    for name, shape in shapes(size, layers):
        nbytes = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
        if at >= SHARD_NBYTES:
            flush()
    flush()
    describe(folder, index, total, config_of(size, layers, fp8=False))
    return total


def main() -> None:
    kind, folder, device, gib = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    nbytes = write_empty(folder, gib) if kind == "large" else write(folder, device, gib, fp8=kind == "fp8")
    print(json.dumps({"nbytes": nbytes}))


if __name__ == "__main__":
    main()
