"""The architectures that are attached in another process, with small random weights. Imported by tests and by workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["ARCHITECTURES", "Architecture", "architecture", "write_checkpoint"]

PLAIN = "support.plain_architectures"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of the table in the documentation.

    Attributes:
        title: As people call it.
        covers: What it has that others do not.
        make: Makes the module with random weights; ``None`` for a plain module, which ``build`` makes.
        build: ``ModelConfig(build=...)``, for what is no Transformers folder.
        finalize: ``ModelConfig(finalize=...)``.
        constants: ``ModelConfig(constants=...)``.
        package: What must be installed.
        refused: What the refusal says, for what cannot be attached.
    """

    title: str
    covers: str
    make: Callable[[], nn.Module] | None = None
    build: str | None = None
    finalize: str | None = None
    constants: tuple[str, ...] = field(default=())
    package: str = "transformers"
    refused: str | None = None


def _hf() -> Any:
    import transformers

    return transformers


_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_SMALL, "vocab_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _llama() -> nn.Module:
    return _hf().LlamaForCausalLM(_hf().LlamaConfig(**_TEXT, tie_word_embeddings=False))  # type: ignore[no-any-return]


def _qwen3() -> nn.Module:
    return _hf().Qwen3ForCausalLM(_hf().Qwen3Config(**_TEXT, head_dim=8, tie_word_embeddings=True))  # type: ignore[no-any-return]


def _qwen3_moe() -> nn.Module:
    return _hf().Qwen3MoeForCausalLM(_hf().Qwen3MoeConfig(**_TEXT, **_EXPERTS, num_experts=4, head_dim=8))  # type: ignore[no-any-return]


def _deepseek_v3() -> nn.Module:
    config = _hf().DeepseekV3Config(
        **{**_TEXT, "num_key_value_heads": 4}, **_EXPERTS, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return _hf().DeepseekV3ForCausalLM(config)  # type: ignore[no-any-return]


def _mixtral() -> nn.Module:
    return _hf().MixtralForCausalLM(_hf().MixtralConfig(**_TEXT, num_local_experts=4, num_experts_per_tok=2))  # type: ignore[no-any-return]


def _gemma() -> nn.Module:
    return _hf().GemmaForCausalLM(_hf().GemmaConfig(**_TEXT, head_dim=8))  # type: ignore[no-any-return]


def _gpt2() -> nn.Module:
    config = _hf().GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    return _hf().GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def _phi3() -> nn.Module:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    config = _hf().Phi3Config(
        **_TEXT, max_position_embeddings=64, original_max_position_embeddings=8,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )  # fmt: skip
    return _hf().Phi3ForCausalLM(config)  # type: ignore[no-any-return]


def _bert() -> nn.Module:
    return _hf().BertForMaskedLM(_hf().BertConfig(**_SMALL, vocab_size=64))  # type: ignore[no-any-return]


def _roberta() -> nn.Module:
    return _hf().RobertaForMaskedLM(_hf().RobertaConfig(**_SMALL, vocab_size=64, max_position_embeddings=40))  # type: ignore[no-any-return]


def _vit() -> nn.Module:
    return _hf().ViTForImageClassification(_hf().ViTConfig(**_SMALL, image_size=16, patch_size=4))  # type: ignore[no-any-return]


def _clip() -> nn.Module:
    text = {**_SMALL, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    config = _hf().CLIPConfig(text_config=text, vision_config={**_SMALL, "image_size": 16, "patch_size": 4}, projection_dim=16)
    return _hf().CLIPModel(config)  # type: ignore[no-any-return]


def _t5() -> nn.Module:
    config = _hf().T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return _hf().T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def _whisper() -> nn.Module:
    config = _hf().WhisperConfig(
        vocab_size=64, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=16, max_target_positions=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    return _hf().WhisperForConditionalGeneration(config)  # type: ignore[no-any-return]


def _mamba() -> nn.Module:
    return _hf().MambaForCausalLM(_hf().MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=2))  # type: ignore[no-any-return]


def _qwen2_5_vl() -> nn.Module:
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = _hf().Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": rope}, vision_config=vision, image_token_id=60, video_token_id=61,
        vision_start_token_id=62, vision_end_token_id=63,
    )  # fmt: skip
    return _hf().Qwen2_5_VLForConditionalGeneration(config)  # type: ignore[no-any-return]


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(title="Llama", covers="rotary embedding, grouped attention", make=_llama),
    "qwen3": Architecture(title="Qwen3", covers="tied embedding, norms of queries and keys", make=_qwen3),
    "qwen3_moe": Architecture(title="Qwen3-MoE", covers="experts, merged from the checkpoint's", make=_qwen3_moe),
    "deepseek_v3": Architecture(title="DeepSeek-V3", covers="MLA, shared experts, a correction bias as buffer", make=_deepseek_v3),
    "mixtral": Architecture(title="Mixtral", covers="experts, merged from the checkpoint's", make=_mixtral),
    "gemma": Architecture(title="Gemma", covers="tied embedding with a scale", make=_gemma),
    "gpt2": Architecture(title="GPT-2", covers="transposed `Conv1D`, tied embedding", make=_gpt2),
    "phi3": Architecture(title="Phi-3, long rope", covers="two rotary tables", make=_phi3),
    "bert": Architecture(title="BERT", covers="a tied decoder and its bias, unsaved buffers", make=_bert),
    "roberta": Architecture(title="RoBERTa", covers="positions from the padding", make=_roberta),
    "vit": Architecture(title="ViT", covers="pictures", make=_vit),
    "clip": Architecture(title="CLIP", covers="text and pictures, a learned temperature", make=_clip),
    "t5": Architecture(title="T5", covers="encoder and decoder, an embedding tied three times", make=_t5),
    "whisper": Architecture(title="Whisper", covers="sound, encoder and decoder, frozen positions", make=_whisper),
    "mamba": Architecture(title="Mamba", covers="state space layers", make=_mamba),
    "qwen2_5_vl": Architecture(title="Qwen2.5-VL", covers="text and pictures, three-way rotary embedding", make=_qwen2_5_vl),
    "unet": Architecture(
        title="UNet (diffusers)", covers="convolutions, group norms, cross attention", build=f"{PLAIN}:unet", package="diffusers"
    ),
    "dit": Architecture(title="DiT (diffusers)", covers="adaptive norms, patches", build=f"{PLAIN}:dit", package="diffusers"),
    "lstm": Architecture(title="`nn.LSTM`", covers="a list of parameters, weak references", build=f"{PLAIN}:Recurrent"),
    "attention": Architecture(title="`nn.MultiheadAttention`", covers="one weight for three uses", build=f"{PLAIN}:Attending"),
    "weight_norm": Architecture(title="`weight_norm`", covers="parametrizations, classes of their own", build=f"{PLAIN}:Normed"),
    "hooked": Architecture(title="Hooks made by the module", covers="functions and bound methods", build=f"{PLAIN}:Hooked"),
    "hooked_later": Architecture(
        title="Hooks added after loading", covers="a hook that the build does not make", build=f"{PLAIN}:Bare",
        finalize=f"{PLAIN}:add_hook", refused="hooks cannot be carried",
    ),
    "batch_norm": Architecture(title="`nn.BatchNorm2d`", covers="buffers that the module writes", build=f"{PLAIN}:Batched"),
    "scripted": Architecture(
        title="`torch.jit.script`", covers="state where Python cannot see it", build=f"{PLAIN}:Bare", finalize=f"{PLAIN}:script",
        refused="ScriptModule",
    ),
}  # fmt: skip


def architecture(name: str) -> Architecture:
    """By its short name."""
    return ARCHITECTURES[name]


def write_checkpoint(name: str, folder: Path) -> dict[str, Any]:
    """Write a checkpoint with random weights; returns the ``ModelConfig`` in plain values."""
    from safetensors.torch import save_model

    from support.worker import resolve

    item = ARCHITECTURES[name]
    torch.manual_seed(sorted(ARCHITECTURES).index(name))
    model = item.make() if item.make is not None else resolve(item.build or "")()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: a model of zeros hides mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    if item.build is None:
        model.save_pretrained(folder / name)
        return {"checkpoint": str(folder / name)}
    path = folder / f"{name}.safetensors"
    save_model(model, str(path))
    cfg: dict[str, Any] = {"checkpoint": str(path), "build": item.build}
    if item.finalize is not None:
        cfg["finalize"] = item.finalize
    if item.constants:
        cfg["constants"] = list(item.constants)
    return cfg
