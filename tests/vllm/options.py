"""For every option of vLLM's ``EngineArgs``: whether changing it must still hit, must miss, or is not a matter of this machine.

A version of vLLM with an option that is not listed fails the test: somebody has to say what it is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

HIT: dict[str, Any] = {
    # lengths, batches, scheduling
    "max_model_len": 64, "max_num_batched_tokens": 512, "max_num_scheduled_tokens": 128, "max_num_seqs": 7,
    "max_num_active_seqs": 5, "max_num_queued_reqs": 9, "max_num_queued_tokens": 900, "long_prefill_token_threshold": 32,
    "long_prefill_token_threshold_adaptive": None, "enable_chunked_prefill": False, "disable_chunked_mm_input": True,
    "scheduler_reserve_full_isl": False, "prefill_schedule_interval": 2, "watermark": 0.1,
    "disable_hybrid_kv_cache_manager": True, "scheduling_policy": "priority", "async_scheduling": None, "stream_interval": 2,
    # KV cache
    "block_size": 32, "enable_prefix_caching": False, "prefix_caching_hash_algo": "sha256_cbor",
    "prefix_cache_retention_interval": 64, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 28,
    "num_gpu_blocks_override": 64,
    "kv_sharing_fast_prefill": None, "swa_bounded_replay": False, "kv_offloading_size": None,
    # how it runs
    "compilation_config": {"mode": 0}, "cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 4,
    "optimization_level": 1, "performance_mode": "throughput", "disable_custom_all_reduce": True, "seed": 7,
    "distributed_executor_backend": "uni", "disable_cascade_attn": False, "shutdown_timeout": 3, "use_tqdm_on_load": False,
    "enable_flashinfer_autotune": False,
    # how weights are read
    "safetensors_load_strategy": "eager", "safetensors_prefetch_num_threads": 2, "safetensors_prefetch_block_size": 1 << 20,
    "pt_load_map_location": "cpu:0", "download_dir": "/tmp", "ignore_patterns": ["nothing/*"], "load_format": "torchwcache",
    "model_loader_extra_config": {"num_threads": 2},
    # requests and answers
    "served_model_name": "another", "tokenizer": "/", "tokenizer_mode": "slow", "skip_tokenizer_init": True,
    "max_logprobs": 5, "logprobs_mode": "raw_logits", "return_sampling_mask": None, "generation_config": "vllm",
    "override_generation_config": {"temperature": 0.5}, "reasoning_parser": None, "enable_prompt_embeds": True,
    "allowed_local_media_path": "/tmp", "allowed_media_domains": ["example.org"], "use_fp64_gumbel": True,
    "enable_sleep_mode": None, "renderer_num_workers": 2,
    # watching
    "disable_log_stats": True, "aggregate_engine_logging": True, "show_hidden_metrics_for_version": None,
    "otlp_traces_endpoint": None, "kv_cache_metrics": True, "kv_cache_metrics_sample": 0.5, "cudagraph_metrics": True,
    "enable_layerwise_nvtx_tracing": True, "enable_mfu_metrics": True, "enable_logging_iteration_details": True,
    "enable_mm_processor_stats": True,
    # where and between whom
    "master_addr": "127.0.0.2", "master_port": 29777, "distributed_timeout_seconds": 99, "cpu_distributed_timeout_seconds": 99,
}  # fmt: skip
"""Option to another value than its default; ``None`` where the default is the only value that this machine takes."""

MISS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "kv_cache_dtype": "fp8",
    "quantization": None,  # no method takes float32
    "enable_expert_parallel": True,
    "expert_placement_strategy": "round_robin",
    "moe_backend": "triton",
    "linear_backend": None,
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

RANKS = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank", "data_parallel_start_rank",
    "data_parallel_size_local", "prefill_context_parallel_size", "decode_context_parallel_size",
)  # fmt: skip
"""In the place of the shard (``ModelConfig.parallel``), which the starts with two ranks test."""

IDENTITY = (
    "model",
    "revision",
    "code_revision",
    "hf_config_path",
    "config_format",
    "tokenizer_revision",
    "hf_token",
    "model_weights",
)
"""The checkpoint counts by its content."""

REFUSED = (
    "enable_eplb", "eplb_config", "enable_elastic_ep", "elastic_ep_max_dp_size", "cpu_offload_gb", "cpu_offload_params",
    "offload_backend", "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "offload_params",
    "weight_transfer_config",
)  # fmt: skip
"""Together with these the cache is refused (``tests/unit/test_vllm_adapter.py``), or they say nothing without those."""

OF_OTHER_MODELS = (
    # multimodal models, LoRA, Mamba, pooling, drafts and the like: whatever of them reaches the model's configs counts
    "language_model_only", "limit_mm_per_prompt", "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs",
    "mm_processor_kwargs", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_hasher_algorithm",
    "mm_shm_cache_max_object_size_mb", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin",
    "skip_mm_profiling", "video_pruning_rate", "video_pruning_method", "mm_tensor_ipc", "mm_processor_device",
    "mm_ipc_gpu_memory_gb", "mm_device_do_normalize", "max_loras", "max_lora_rank", "default_mm_loras", "fully_sharded_loras",
    "max_cpu_loras", "lora_dtype", "lora_target_modules", "enable_tower_connector_lora", "specialize_active_lora",
    "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "max_lora_cls_labels", "mamba_config", "mamba_ssm_cache_dtype",
    "mamba_block_size", "mamba_cache_mode", "enable_mamba_shared_prefix_checkpoint", "replayssm_buffer_len", "use_replayssm",
    "mamba_backend", "mamba_ssu_algorithm", "enable_mamba_cache_stochastic_rounding", "mamba_cache_philox_rounds",
    "pooler_config", "speculative_config", "spec_method", "spec_model", "spec_tokens", "diffusion_config", "engram_config",
    "model_class_overrides", "quantization_config", "allow_deprecated_quantization", "gdn_prefill_backend", "kda_prefill_backend",
    "kda_decode_backend", "enable_hc_sp", "prefix_match_unit",
)  # fmt: skip

OF_OTHER_MACHINES = (
    # several nodes, GPUs, services that are not here
    "nnodes", "node_rank", "numa_bind", "numa_bind_nodes", "numa_bind_cpus", "device_ids", "dcp_comm_backend", "dcp_q_replicate",
    "dcp_kv_cache_interleave_size", "cp_kv_cache_interleave_size", "data_parallel_address", "data_parallel_rpc_port",
    "data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb", "data_parallel_backend",
    "enable_batch_sharded_sampling", "enable_ep_weight_filter", "sparse_indexer_topk_backend", "all2all_backend", "enable_dbo",
    "ubatch_size", "dbo_decode_token_threshold", "dp_sync_interval", "dbo_prefill_token_threshold",
    "disable_nccl_for_dp_synchronization", "_api_process_count", "_api_process_rank", "max_parallel_loading_workers",
    "enable_shm_tensor_arena", "ray_workers_use_nsight", "ir_op_priority", "kernel_config", "attention_config",
    "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names", "enable_cumem_allocator", "enable_nccl_comm_suspend",
    "kv_offloading_backend", "fault_tolerance_config", "enable_fault_tolerance", "worker_cls", "worker_extension_cls",
    "kv_transfer_config", "kv_events_config", "ec_transfer_config", "ec_manager_config",
)  # fmt: skip

NOT_OF_THE_MODEL = (
    "enable_return_routed_experts", "enable_trace_replay", "structured_outputs_config", "aux_output_config",
    "reasoning_parser_plugin", "watermark_config", "collect_detailed_traces", "per_request_spec_decode_metrics",
    "custom_histogram_buckets", "jit_monitor_mode", "jit_monitor_verbose", "scheduler_cls", "profiler_config", "logging_config",
    "log_level", "log_config_file", "reasoning_config", "io_processor_plugin", "logits_processors", "tokens_only",
    "fail_on_environ_validation",
)  # fmt: skip

LISTED = {*HIT, *MISS, *RANKS, *IDENTITY, *REFUSED, *OF_OTHER_MODELS, *OF_OTHER_MACHINES, *NOT_OF_THE_MODEL}


def main(model: str) -> None:
    """Print, as JSON, the options of this vLLM, and for each value of ours whether the fields of the fingerprint change."""
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    from torchwcache.identity.fingerprint import Fingerprint, diff
    from torchwcache_vllm.identity import config_fields

    base = {"model": model, "dtype": "float32", "max_model_len": 128, "enforce_eager": True}

    def fingerprint(**changed: Any) -> Fingerprint:
        config = EngineArgs(**{**base, **changed}).create_engine_config()
        return Fingerprint.from_fields(config_fields(config, config.model_config))

    plain = fingerprint()
    found: dict[str, Any] = {}
    names = [item.name for item in dataclasses.fields(EngineArgs)]
    for name, value in (HIT | MISS).items():
        if value is None or name not in names:
            continue
        try:
            found[name] = [item.path for item in diff(plain, fingerprint(**{name: value}))]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print("RESULT " + json.dumps({"names": names, "found": found}))


if __name__ == "__main__":
    main(sys.argv[1])
