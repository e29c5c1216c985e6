"""For every option of vLLM's ``EngineArgs``: whether changing it must still hit, or must miss.

A version of vLLM with an option that is not listed fails the test: somebody has to say what it is. Those of ``HIT`` and ``MISS``
are given to vLLM as a user gives them. What this machine, or this model, does not take is changed where vLLM's config keeps it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

HIT: dict[str, Any] = {
    # lengths, batches, scheduling
    "max_model_len": 64, "max_num_batched_tokens": 512, "max_num_scheduled_tokens": 128, "max_num_seqs": 7,
    "max_num_active_seqs": 5, "max_num_queued_reqs": 9, "max_num_queued_tokens": 900, "long_prefill_token_threshold": 32,
    "enable_chunked_prefill": False, "disable_chunked_mm_input": True,
    "scheduler_reserve_full_isl": False, "prefill_schedule_interval": 2, "watermark": 0.1,
    "disable_hybrid_kv_cache_manager": True, "scheduling_policy": "priority", "stream_interval": 2,
    # KV cache
    "block_size": 32, "enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor",
    "prefix_cache_retention_interval": 64, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 28,
    "num_gpu_blocks_override": 64,
    "swa_bounded_replay": False,
    # how it runs
    "cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 4,
    "optimization_level": 1, "performance_mode": "throughput", "disable_custom_all_reduce": True, "seed": 7,
    "distributed_executor_backend": "uni", "disable_cascade_attn": False, "shutdown_timeout": 3, "use_tqdm_on_load": False,
    "enable_flashinfer_autotune": False,
    # how weights are read
    "safetensors_load_strategy": "eager", "safetensors_prefetch_num_threads": 2, "safetensors_prefetch_block_size": 1 << 20,
    "pt_load_map_location": "cpu:0", "download_dir": "/tmp", "ignore_patterns": ["nothing/*"], "load_format": "torchwcache",
    "model_loader_extra_config": {"num_threads": 2},
    # requests and answers
    "served_model_name": "another", "tokenizer": "/", "tokenizer_mode": "slow", "skip_tokenizer_init": True,
    "max_logprobs": 5, "logprobs_mode": "raw_logits", "generation_config": "vllm",
    "override_generation_config": {"temperature": 0.5}, "enable_prompt_embeds": True,
    "allowed_local_media_path": "/tmp", "allowed_media_domains": ["example.org"], "use_fp64_gumbel": True,
    "renderer_num_workers": 2,
    # watching
    "disable_log_stats": True, "aggregate_engine_logging": True,
    "kv_cache_metrics": True, "kv_cache_metrics_sample": 0.5, "cudagraph_metrics": True,
    "enable_layerwise_nvtx_tracing": True, "enable_mfu_metrics": True, "enable_logging_iteration_details": True,
    "enable_mm_processor_stats": True,
    # where and between whom
    "master_addr": "127.0.0.2", "master_port": 29777, "distributed_timeout_seconds": 99, "cpu_distributed_timeout_seconds": 99,
}  # fmt: skip
"""Option to another value than its default."""

MISS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "compilation_config": {"mode": 0},  # with other modes layers call other operators, as with enforce_eager
    "hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "kv_cache_dtype": "fp8",
    "enable_expert_parallel": True,
    "expert_placement_strategy": "round_robin",
    "moe_backend": "triton",
    "attention_backend": "CPU_ATTN",
    "model_impl": "transformers",
    "convert": "embed",
    "runner": "pooling",
    "enable_lora": True,
    "additional_config": {"anything": 1},
    "kv_cache_dtype_skip_layers": ["0"],
    "trust_remote_code": True,
    "mamba_cache_dtype": "float32",
    "disable_sliding_window": True,
}

NEUTRAL = (
    # in the place of the shard (``ModelConfig.parallel``), which the starts with two ranks test
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank",
    "data_parallel_size_local",
    # the checkpoint counts by its content
    "model", "revision", "code_revision", "hf_config_path", "config_format", "tokenizer_revision", "hf_token", "model_weights",
    # the cache is refused together with these (``tests/unit/test_vllm_adapter.py``), or they say nothing without those
    "eplb_config", "cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size", "offload_num_in_group",
    "offload_prefetch_step", "offload_params", "weight_transfer_config", "elastic_ep_max_dp_size",
    # another model's, which has an entry of its own
    "speculative_config", "spec_method", "spec_model", "spec_tokens",
    # the cache of states of Mamba models
    "mamba_block_size", "mamba_cache_mode", "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm",
    "prefix_match_unit",
    # several nodes, GPUs, services that are not here
    "nnodes", "node_rank", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "device_ids", "dcp_comm_backend",
    "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "data_parallel_address", "data_parallel_rpc_port",
    "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_backend", "enable_batch_sharded_sampling", "enable_dbo",
    "ubatch_size", "dbo_decode_token_threshold", "dp_sync_interval", "dbo_prefill_token_threshold",
    "disable_nccl_for_dp_synchronization", "_api_process_count", "_api_process_rank", "max_parallel_loading_workers",
    "enable_shm_tensor_arena", "ray_workers_use_nsight", "ir_op_priority", "fault_tolerance_config", "enable_fault_tolerance",
    "worker_cls", "worker_extension_cls", "kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config",
    # memory
    "enable_sleep_mode", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "enable_cumem_allocator",
    "enable_nccl_comm_suspend", "kv_offloading_backend", "kv_offloading_size", "kv_sharing_fast_prefill",
    # requests and answers, batches, watching
    "enable_return_routed_experts", "return_sampling_mask", "enable_trace_replay", "structured_outputs_config", "reasoning_parser",
    "reasoning_parser_plugin", "reasoning_config", "aux_output_config", "watermark_config", "logits_processors",
    "io_processor_plugin", "async_scheduling", "long_prefill_token_threshold_adaptive", "scheduler_cls", "collect_detailed_traces",
    "per_request_spec_decode_metrics", "custom_histogram_buckets", "jit_monitor_mode", "jit_monitor_verbose",
    "otlp_traces_endpoint", "show_hidden_metrics_for_version", "profiler_config", "logging_config", "log_level", "log_config_file",
)  # fmt: skip
"""Changed in the resolved config: the fingerprint must stay."""

COUNTING = (
    "quantization", "quantization_config", "allow_deprecated_quantization", "model_class_overrides", "pooler_config",
    "linear_backend", "sparse_indexer_topk_backend", "all2all_backend", "kernel_config", "attention_config",
    "gdn_prefill_backend", "kda_prefill_backend", "kda_decode_backend",
    # ways to shard, and what the placement of experts goes by
    "prefill_context_parallel_size", "decode_context_parallel_size", "dcp_q_replicate", "enable_hc_sp", "enable_ep_weight_filter",
    "enable_eplb", "enable_elastic_ep",
    # LoRA: layers get slots for adapters
    "max_loras", "max_lora_rank", "default_mm_loras", "fully_sharded_loras", "max_cpu_loras", "lora_dtype", "lora_target_modules",
    "enable_tower_connector_lora", "specialize_active_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras",
    "max_lora_cls_labels",
    # all of a multimodal model's options: which of them its parts go by is for each model to say
    "language_model_only", "limit_mm_per_prompt", "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs",
    "mm_processor_kwargs", "mm_processor_device", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm",
    "mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin",
    "skip_mm_profiling", "video_pruning_rate", "video_pruning_method", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb",
    "mm_device_do_normalize",
    # other kinds of models
    "mamba_config", "mamba_ssm_cache_dtype", "mamba_backend", "mamba_ssu_algorithm", "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds", "diffusion_config", "engram_config",
)  # fmt: skip
"""Changed in the resolved config: the fingerprint must change."""

PLACES = {
    "data_parallel_start_rank": "parallel_config.data_parallel_rank",
    "data_parallel_address": "parallel_config.data_parallel_master_ip",
    "device_ids": "parallel_config.assigned_physical_gpu_ids",
    "spec_method": "speculative_config",
    "spec_model": "speculative_config",
    "spec_tokens": "speculative_config",
    "log_config_file": "logging_config.pylogging_config_file",
    "limit_mm_per_prompt": "model_config.multimodal_config.limit_per_prompt",
    "mm_processor_device": "model_config.multimodal_config.mm_processor_kwargs",
    "lora_target_modules": "lora_config.target_modules",
    "mamba_backend": "mamba_config.backend",
    "mamba_ssu_algorithm": "mamba_config.ssu_algorithm",
    "enable_mamba_cache_stochastic_rounding": "mamba_config.enable_stochastic_rounding",
    "mamba_cache_philox_rounds": "mamba_config.stochastic_rounding_philox_rounds",
    "gdn_prefill_backend": "additional_config",
    "kda_prefill_backend": "additional_config",
    "kda_decode_backend": "additional_config",
}
"""Where the config keeps an option, if not in a field of the same name."""

NOWHERE = {
    "data_parallel_multi_port_external_lb": "read by the command that starts the servers of all ranks, and by nothing after it",
    "tokens_only": "read by the HTTP server",
    "fail_on_environ_validation": "whether an unknown variable stops the start",
}
"""Options that leave nothing in the config that could be changed."""

LISTED = {*HIT, *MISS, *NEUTRAL, *COUNTING, *NOWHERE}

COUNTING_ALL_THE_SAME = ("compilation_config.mode", "compilation_config.custom_ops")
"""Fields of parts that are not counted otherwise."""

VARIABLES = {
    "VLLM_API_KEY", "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_ASSETS_CACHE", "VLLM_ASSETS_CACHE_MODEL_CLEAN",
    "VLLM_AUDIO_FETCH_TIMEOUT", "VLLM_CACHE_ROOT", "VLLM_COMPILE_CACHE_SAVE_FORMAT", "VLLM_CONFIG_ROOT", "VLLM_CPU_CI_ENV",
    "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_DEBUG_DUMP_PATH",
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE", "VLLM_DEBUG_MFU_METRICS", "VLLM_DEBUG_WORKSPACE", "VLLM_DISABLE_COMPILE_CACHE",
    "VLLM_DO_NOT_TRACK", "VLLM_DP_MASTER_IP", "VLLM_DP_MASTER_PORT", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_SIZE",
    "VLLM_ENABLE_STARTUP_PLAN", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ENGINE_ITERATION_TIMEOUT_S", "VLLM_ENGINE_READY_TIMEOUT_S",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_HOST_IP", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "VLLM_IMAGE_FETCH_TIMEOUT",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "VLLM_LOGGING_COLOR", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_PREFIX", "VLLM_LOGGING_STREAM", "VLLM_LOG_BATCHSIZE_INTERVAL", "VLLM_LOG_MODEL_INSPECTION",
    "VLLM_LOG_STATS_INTERVAL", "VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_LORA_RESOLVER_HF_REPO_LIST", "VLLM_MEDIA_CACHE",
    "VLLM_MEDIA_CACHE_MAX_SIZE_MB", "VLLM_MEDIA_CACHE_TTL_HOURS", "VLLM_MEDIA_CONNECTOR", "VLLM_MEDIA_FETCH_MAX_RETRIES",
    "VLLM_MEDIA_LOADING_THREAD_COUNT", "VLLM_MEDIA_URL_ALLOW_REDIRECTS", "VLLM_NCCL_SO_PATH", "VLLM_NO_USAGE_STATS",
    "VLLM_PLUGINS", "VLLM_PORT", "VLLM_PROCESS_NAME_PREFIX", "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_DP_PACK_STRATEGY",
    "VLLM_RAY_DP_PLACEMENT_NODE_IPS", "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY",
    "VLLM_RAY_PER_WORKER_GPUS", "VLLM_RINGBUFFER_WARNING_INTERVAL", "VLLM_RPC_BASE_PATH", "VLLM_SERVER_DEV_MODE",
    "VLLM_SKIP_P2P_CHECK", "VLLM_TARGET_DEVICE", "VLLM_TEST_FORCE_LOAD_FORMAT", "VLLM_TRACE_FUNCTION", "VLLM_USAGE_SOURCE",
    "VLLM_USAGE_STATS_SERVER", "VLLM_USE_AOT_COMPILE", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "VLLM_USE_RAY_WRAPPED_PP_COMM",
    "VLLM_VIDEO_FETCH_TIMEOUT", "VLLM_WORKER_MULTIPROC_METHOD",
}  # fmt: skip
"""Variables of vLLM's that may differ. The fingerprint leaves them out by the beginnings of their names."""


def given(base: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Give each option of ``HIT`` and ``MISS`` to vLLM; name to the fields of the fingerprint that change, or to an error."""
    from vllm.engine.arg_utils import EngineArgs

    from torchwcache.identity.fingerprint import Fingerprint, diff
    from torchwcache_vllm.identity import config_fields

    def fingerprint(**changed: Any) -> Fingerprint:
        config = EngineArgs(**{**base, **changed}).create_engine_config()
        return Fingerprint.from_fields(config_fields(config, config.model_config))

    plain = fingerprint()
    found: dict[str, Any] = {}
    for name, value in (HIT | MISS).items():
        if name in names:
            try:
                found[name] = [item.path for item in diff(plain, fingerprint(**{name: value}))]
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def changed_in_place(base: dict[str, Any]) -> dict[str, Any]:
    """Change every field of vLLM's resolved config; its path to whether the fingerprint changes, or to an error."""
    import dataclasses

    from vllm.config import LoRAConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.config.pooler import PoolerConfig
    from vllm.engine.arg_utils import EngineArgs

    from torchwcache.identity.fingerprint import Fingerprint
    from torchwcache_vllm.identity import config_fields

    config = EngineArgs(**base).create_engine_config()
    # Parts that this model has not: their fields are options, too.
    config.lora_config = LoRAConfig()
    config.model_config.multimodal_config = MultiModalConfig()
    config.model_config.pooler_config = PoolerConfig()

    def digest() -> str:
        return Fingerprint.from_fields(config_fields(config, config.model_config)).hex

    before = digest()
    found: dict[str, Any] = {}

    def change(part: Any, prefix: str) -> None:
        for item in dataclasses.fields(part):
            path, value = prefix + item.name, getattr(part, item.name, None)
            if dataclasses.is_dataclass(value) and type(value).__module__.startswith("vllm."):
                change(value, path + ".")
            if path in ("model_config", "compilation_config"):
                continue  # what counts is read from their fields
            object.__setattr__(part, item.name, ("something else", str(value)))
            try:
                found[path] = digest() != before
            except Exception as error:
                found[path] = f"{type(error).__name__}: {error}"
            object.__setattr__(part, item.name, value)

    change(config, "")
    assert digest() == before
    return found


def main(model: str) -> None:
    """Print, as JSON, the options of this vLLM and what becomes of the fingerprint when each of them is changed."""
    import dataclasses

    import vllm.envs
    from vllm.engine.arg_utils import EngineArgs

    from torchwcache_vllm.identity import variables

    base = {"model": model, "dtype": "float32", "max_model_len": 128}  # and graphs, as ``vllm serve`` does by itself
    names = [item.name for item in dataclasses.fields(EngineArgs)]
    known = {name: "1" for name in vllm.envs.environment_variables if name.startswith("VLLM_")}
    result = {
        "names": names,
        "given": given(base, names),
        "fields": changed_in_place(base),
        "variables": sorted(set(known) - set(variables(known))),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
