"""What of a vLLM configuration decides the finished weights, and what does not.

Everything counts unless it is listed here: an option that a later vLLM adds makes a miss, never a wrong hit.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from typing import Any

from torchwcache.errors import FingerprintError

__all__ = ["NOT_COUNTED", "NOT_COUNTED_VARIABLES", "config_fields", "variables"]

_ALL = "*"

NOT_COUNTED: dict[str, tuple[str, ...]] = {
    # Where the files are, how requests come in and go out, how long they may be. The content of the files counts by itself.
    "model_config": (
        "model", "model_weights", "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "revision",
        "code_revision", "hf_config_path", "hf_token", "served_model_name", "hf_text_config", "config_format",
        "allowed_local_media_path", "allowed_media_domains", "max_model_len", "original_max_model_len", "spec_target_max_model_len",
        "seed", "enforce_eager", "max_logprobs", "logprobs_mode", "return_sampling_mask", "use_fp64_gumbel", "enable_trace_replay",
        "disable_cascade_attn", "generation_config", "override_generation_config", "enable_sleep_mode",
        "sleep_preserve_parameter_names", "sleep_mode_backend", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend",
        "enable_cumem_allocator", "logits_processors", "logits_processor_pattern", "io_processor_plugin", "renderer_num_workers",
        "enable_prompt_embeds", "skip_mm_profiling", "use_async_output_proc", "enable_return_routed_experts",
    ),
    # Sizes and places of the KV cache. Its dtype and scales enter the weights.
    "cache_config": (
        "block_size", "user_specified_block_size", "user_specified_mamba_block_size", "kv_cache_layout", "prefix_match_unit",
        "gpu_memory_utilization", "num_gpu_blocks_override", "enable_prefix_caching", "prefix_caching_hash_algo",
        "prefix_cache_retention_interval", "mamba_page_size_padded", "skip_page_size_padded", "mamba_block_size",
        "mamba_cache_mode", "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm", "num_gpu_blocks",
        "num_cpu_blocks", "effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency",
        "hash_block_size", "cache_hit_alignment_tokens", "kv_sharing_fast_prefill", "swa_bounded_replay", "kv_cache_memory_bytes",
        "kv_offloading_size", "kv_offloading_backend", "_block_size_resolved", "swap_space",
        "cpu_offload_gb", "cpu_kvcache_space_bytes", "simple_cpu_offload_num_blocks", "enable_mamba_fine_grained_prefix_cache",
    ),
    # Ports, processes and machines. Sizes and ranks of the axes that shard weights are in ``ModelConfig.parallel``.
    "parallel_config": (
        "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size", "data_parallel_size_local", "data_parallel_rank",
        "data_parallel_rank_local", "data_parallel_index", "data_parallel_master_ip", "data_parallel_rpc_port",
        "data_parallel_master_port", "data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb",
        "dp_sync_interval", "max_parallel_loading_workers", "disable_custom_all_reduce", "enable_shm_tensor_arena",
        "enable_batch_sharded_sampling", "dbo_decode_token_threshold", "dbo_prefill_token_threshold", "ubatch_size", "enable_dbo",
        "disable_nccl_for_dp_synchronization", "ray_workers_use_nsight", "ray_runtime_env", "placement_group",
        "distributed_executor_backend", "worker_cls", "sd_worker_cls", "worker_extension_cls", "master_addr", "master_port",
        "node_rank", "nnodes", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "assigned_physical_gpu_ids",
        "distributed_timeout_seconds", "cpu_distributed_timeout_seconds", "world_size", "rank", "_data_parallel_master_port_list",
        "_coord_store_port", "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "dcp_comm_backend",
        "_allow_auto_resolve_cp_interleave_size", "_api_process_count", "_api_process_rank", "enable_fault_tolerance",
        "fault_tolerance_config", "eplb_config", "elastic_ep_max_dp_size",
    ),
    # How requests are batched, watched and answered.
    "scheduler_config": (_ALL,), "observability_config": (_ALL,), "logging_config": (_ALL,), "profiler_config": (_ALL,),
    "structured_outputs_config": (_ALL,), "kv_transfer_config": (_ALL,), "kv_events_config": (_ALL,),
    "ec_transfer_config": (_ALL,), "ec_manager_config": (_ALL,), "reasoning_config": (_ALL,), "aux_output_config": (_ALL,),
    "watermark_config": (_ALL,), "watchdog_config": (_ALL,), "weight_transfer_config": (_ALL,), "offload_config": (_ALL,),
    "instance_id": (_ALL,), "shutdown_timeout": (_ALL,), "prompt_adapter_config": (_ALL,), "decoding_config": (_ALL,),
    # How weights come from disk; which bytes they are counts by content.
    "load_config": (_ALL,), "device_config": (_ALL,),
    # How the same weights are compiled and captured into graphs; two of its fields count all the same, see ``config_fields``.
    "compilation_config": (_ALL,), "optimization_level": (_ALL,), "performance_mode": (_ALL,),
    # Resolved from ``model_config.quantization`` and the checkpoint's config, both of which count.
    "quant_config": (_ALL,),
    # Another model's; a draft's own settings are in its model config.
    "speculative_config": (_ALL,),
    "kernel_config": (
        "ir_op_priority", "enable_flashinfer_autotune", "enable_rocm_segmented_attn_autotune", "enable_cutedsl_warmup",
        "enable_jit_warmup",
    ),
    "attention_config": (
        "flash_attn_max_num_splits_for_cuda_graph", "tq_max_kv_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv",
        "flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size", "flex_attn_kv_block_size",
        "sparse_mla_prefill_workspace_factor",
    ),
}  # fmt: skip
"""Fields of ``VllmConfig``'s parts that do not change the finished weights."""

NOT_COUNTED_VARIABLES = (
    "VLLM_HOST_IP", "VLLM_PORT", "VLLM_RPC_", "VLLM_LOGGING_", "VLLM_LOG", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_CI_ENV", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ENABLE_STARTUP_PLAN",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE", "VLLM_API_KEY", "VLLM_PLUGINS", "VLLM_DIST_IDENT", "VLLM_DP_",
    "VLLM_NO_USAGE_STATS", "VLLM_USAGE_", "VLLM_DO_NOT_TRACK", "VLLM_DEBUG_", "VLLM_TRACE_", "VLLM_TORCH_PROFILER_",
    "VLLM_ENGINE_", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_HTTP_", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "VLLM_RINGBUFFER_",
    "VLLM_IMAGE_FETCH_TIMEOUT", "VLLM_VIDEO_FETCH_TIMEOUT", "VLLM_AUDIO_FETCH_TIMEOUT", "VLLM_MEDIA_", "VLLM_MM_INPUT_CACHE_",
    "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_DISABLE_COMPILE_CACHE",
    "VLLM_COMPILE_", "VLLM_USE_AOT_COMPILE", "VLLM_PROCESS_NAME_PREFIX", "VLLM_SLEEP_WHEN_IDLE", "VLLM_LORA_RESOLVER_",
    "VLLM_NCCL_SO_PATH", "VLLM_SKIP_P2P_CHECK", "VLLM_USE_RAY_", "VLLM_RAY_", "VLLM_TEST_FORCE_LOAD_FORMAT", "VLLM_TARGET_DEVICE",
)  # fmt: skip
"""Beginnings of names of environment variables that do not change the finished weights. Every other ``VLLM_*`` counts."""

_NEVER = ("name_or_path", "_name_or_path", "transformers_version", "_commit_hash")


def config_fields(vllm_config: Any, model_config: Any) -> dict[str, Any]:
    """The part of the fingerprint that comes from vLLM's configuration.

    Args:
        vllm_config: Of the engine.
        model_config: Of the model that is loaded: the target's or a draft's.

    Raises:
        FingerprintError: A part holds something without a canonical form.
    """
    found: dict[str, Any] = {}
    for item in dataclasses.fields(vllm_config):
        excluded = NOT_COUNTED.get(item.name, ())
        if _ALL in excluded:
            continue
        value = model_config if item.name == "model_config" else getattr(vllm_config, item.name)
        found[item.name] = _plain(value, item.name, excluded)
    compilation = getattr(vllm_config, "compilation_config", None)
    if compilation is not None:
        # Layers resolve at build which of vLLM's own operators they call, and keep that as attributes.
        found["compilation"] = {
            "mode": getattr(compilation.mode, "name", str(compilation.mode)),
            "custom_ops": sorted(compilation.custom_ops),
        }
    if _length_decides(model_config):
        found["max_model_len"] = model_config.max_model_len
    return found


def _length_decides(model_config: Any) -> bool:
    """Whether vLLM picks other factors for rotary embeddings by the length that is served (``phi3_long_rope_scaled_rope.py``)."""
    text = str(getattr(model_config.hf_config, "to_dict", dict)())
    return any(word in text for word in ("longrope", "attn_temperature_tuning", "'dynamic'", "'su'"))


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables of vLLM that are set and count."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith("VLLM_") and not name.startswith(NOT_COUNTED_VARIABLES)
    }


def _plain(value: Any, path: str, excluded: tuple[str, ...] = ()) -> Any:
    import torch

    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        return value if type(value).__module__ in ("builtins", "torch") else str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, torch.device):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value) if item.name not in excluded]
        return {name: _plain(getattr(value, name, None), f"{path}.{name}") for name in names}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{path}[{key!r}]") for key, item in value.items() if key not in _NEVER}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict(), path)
    if isinstance(value, type) or callable(value):
        name = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
        if name.startswith("vllm."):
            return name
    raise FingerprintError(
        f"{path} is a {type(value).__name__}, of which it cannot be told whether it changes the weights; the model is not cached",
        path=path,
    )
