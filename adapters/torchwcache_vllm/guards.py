"""What would write into weights that others map, or move them away: refused in words, before it begins."""

from __future__ import annotations

from typing import Any

from torchwcache.attachment import Attachment

__all__ = ["guard_worker", "refusal_of"]


def refusal_of(vllm_config: Any, load_config: Any) -> str:
    """Why this configuration is not served from the cache; empty when it is."""
    parallel, offload = vllm_config.parallel_config, getattr(vllm_config, "offload_config", None)
    if getattr(parallel, "enable_eplb", False):
        return "--enable-eplb moves experts between ranks while the engine serves, which writes into the weights"
    if getattr(parallel, "enable_elastic_ep", False):
        return "--enable-elastic-ep gives ranks other experts while the engine serves"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "--weight-transfer-config lets a trainer write into the weights"
    if load_config.device is not None and str(load_config.device) != str(vllm_config.device_config.device):
        return "the load config puts weights on another device than the engine's"
    if offload is not None and (
        _positive(offload, "uva", "cpu_offload_gb") or _positive(offload, "prefetch", "offload_group_size")
    ):
        return "--cpu-offload-gb and its kin move weights to host memory"
    if getattr(vllm_config.cache_config, "cpu_offload_gb", 0):
        return "--cpu-offload-gb moves weights to host memory"
    return ""


def _positive(offload: Any, part: str, name: str) -> bool:
    return bool(getattr(getattr(offload, part, None), name, 0))


def guard_worker(attachment: Attachment) -> None:
    """Placeholder until the worker's own entrances are guarded."""
