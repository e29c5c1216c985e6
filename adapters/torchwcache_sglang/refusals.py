"""What is not cached, found out before anything is loaded: each with its reason."""

from __future__ import annotations

from typing import Any

import torch

from torchwcache_sglang import seams
from torchwcache_sglang.context import option

__all__ = ["OPTIONS", "refusal"]

_WRITES = "it writes into weights while the engine runs, and shared ones must not change"
_MOVES = "it keeps weights in other memory than the device's"

_OFF: tuple[object, ...] = (None, False, 0, -1, "", "none", "off")
_OPTIONS: tuple[tuple[str, str], ...] = (
    ("enable_eplb", f"--enable-eplb moves experts between ranks: {_WRITES}"),
    ("enable_elastic_expert_backup", f"--enable-elastic-expert-backup: {_WRITES}"),
    ("elastic_ep_backend", f"--elastic-ep-backend: {_WRITES}"),
    ("enable_weights_cpu_backup", "--enable-weights-cpu-backup frees and restores weights, which are shared; leave it out"),
    ("cpu_offload_gb", f"--cpu-offload-gb: {_MOVES}"),
    ("offload_group_size", f"--offload-group-size: {_MOVES}"),
    ("ple_offload_embedding", f"--ple-offload-embedding: {_MOVES}"),
    ("enable_paged_experts", f"--enable-paged-experts: {_MOVES}"),
    ("kt_weight_path", f"--kt-weight-path: {_MOVES}"),
    ("rl_quant_profile", "--rl-quant-profile quantizes anew at each weight update"),
    ("modelopt_quant", "--modelopt-quant calibrates while loading: not a function of the checkpoint"),
    ("quantize_and_serve", "--quantize-and-serve calibrates while loading: not a function of the checkpoint"),
    ("weight_cache_mode", "SGLang's own --weight-cache-mode is on; use one of the two"),
)
_DRAFT_OPTIONS = (
    ("enable_draft_weights_cpu_backup", "--enable-draft-weights-cpu-backup frees and restores weights, which are shared"),
)

OPTIONS: tuple[str, ...] = (*(name for name, _ in _OPTIONS + _DRAFT_OPTIONS), "dwdp_size", "startup_weight_load_mode")
"""Names of the options that are refused, at least with some of their values."""


def refusal(inner: Any, model_config: Any) -> str | None:
    """Why a model is not cached, or ``None``.

    Args:
        inner: SGLang's own loader for it.
        model_config: SGLang's ``ModelConfig``; ``None`` where the caller has none.
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if type(inner) is not DefaultModelLoader:
        load_format = getattr(inner.load_config.load_format, "value", inner.load_config.load_format)
        return f"{type(inner).__name__} (--load-format {load_format}) loads in a way of its own"
    if model_config is None:
        return "whoever asked for the loader did not say for which model"
    device = option("device", "cuda")
    if device not in ("cpu", "cuda") or (device == "cuda" and torch.version.hip is not None):
        return f"memory that outlives its process is known on the CPU and on NVIDIA GPUs, not on {device}"
    for name, why in _OPTIONS + _DRAFT_OPTIONS if getattr(model_config, "is_draft_model", False) else _OPTIONS:
        if option(name) not in _OFF:
            return why
    if (option("dwdp_size") or 1) > 1:
        return f"--dwdp-size: {_MOVES}"
    if getattr(model_config, "pointer_head", None) is not None:
        return "a LoRA adapter is merged into the weights while loading"
    if option("startup_weight_load_mode", "serial") == "overlap":
        return "--startup-weight-load-mode overlap captures graphs before there are weights"
    return seams.check()[1] or None
