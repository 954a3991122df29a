"""DeepSpeed's keys of ZeRO, offload and compilation, and what becomes of them here."""

from pipeline.config.deepspeed.key import no_effect, refused, used

_ZERO = "zero_optimization."
_OPTIMIZER = _ZERO + "offload_optimizer."
_PARAM = _ZERO + "offload_param."

_ZERO_USED = used(
    {
        _ZERO + "stage": "zero_stage; zero_optimization: true is stage 1",
        _OPTIMIZER + "device": "zero.offload.optimizer, and from stage 2 zero.offload.gradients",
        _OPTIMIZER + "nvme_path": "zero.offload.nvme_path",
        _OPTIMIZER + "pin_memory": "zero.offload.pin_memory",
        _PARAM + "device": "zero.offload.params",
        _PARAM + "nvme_path": "zero.offload.nvme_path",
        _PARAM + "pin_memory": "zero.offload.pin_memory",
        _ZERO + "cpu_offload": "zero.offload.optimizer cpu (deprecated)",
        _ZERO + "cpu_offload_param": "zero.offload.params cpu (deprecated)",
        _ZERO + "cpu_offload_params": "zero.offload.params cpu (deprecated)",
        _ZERO + "cpu_offload_use_pin_memory": "zero.offload.pin_memory (deprecated)",
        _ZERO + "stage3_prefetch_bucket_size": "zero.prefetch_units 0 where it is 0",
        _ZERO + "prefetch_bucket_size": "stage3_prefetch_bucket_size, by its short name",
        "compile.deepcompile": "zero.compile",
        "compile.enabled": "zero.compile (DeepSpeed before 0.15)",
    }
)

_ZERO_NO_EFFECT = {
    **no_effect(
        _ZERO,
        [
            "allgather_partitions",
            "allgather_bucket_size",
            "allgather_size",
            "reduce_bucket_size",
            "reduce_scatter",
            "contiguous_gradients",
            "overlap_comm",
            "round_robin_gradients",
            "grad_hooks",
            "use_multi_rank_bucket_allreduce",
            "sub_group_size",
            "legacy_stage1",
            "stage3_use_all_reduce_for_fetch_params",
            "use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "allgather_sequential",
        ],
        "a transformer block is one contiguous bucket, gathered and reduced by one collective",
    ),
    **no_effect(
        _ZERO,
        [
            "stage3_max_live_parameters",
            "max_live_parameters",
            "stage3_max_reuse_distance",
            "max_reuse_distance",
            "stage3_param_persistence_threshold",
            "param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "module_granularity_threshold",
            "memory_efficient_linear",
            "leaf_module.classes",
            "leaf_module.names",
            "leaf_module.name_suffixes",
        ],
        "weights are gathered by transformer block and freed after use; zero.unit_classes chooses"
        " other units",
    ),
    **no_effect(
        _ZERO,
        [
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ],
        "a saved model is always whole",
    ),
    **no_effect(
        _ZERO,
        ["elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"],
        "checkpoints have a format of their own, with fp32 masters",
    ),
    **no_effect(
        _ZERO,
        [
            "ignore_unused_parameters",
            "find_unused_parameters",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "save_muon_momentum_buffer_in_memory",
        ],
        "it steers DeepSpeed's own bookkeeping",
    ),
    **no_effect(
        _OPTIMIZER,
        ["buffer_count", "pipeline", "pipeline_read", "pipeline_write", "fast_init"],
        "offloaded state is read and written unit by unit, with two buffers",
    ),
    **no_effect(
        _OPTIMIZER,
        ["ratio", "super_offload", "cpuadam_cores_perc"],
        "all of the optimizer state is offloaded, and torch's threads update it",
    ),
    **no_effect(
        _PARAM,
        ["buffer_count", "buffer_size", "max_in_cpu"],
        "offloaded weights are read unit by unit, with two buffers",
    ),
    **no_effect(
        "aio.",
        [
            "block_size",
            "queue_depth",
            "thread_count",
            "intra_op_parallelism",
            "single_submit",
            "overlap_events",
            "use_gds",
        ],
        "files are read and written by a few threads of this process",
    ),
    **no_effect(
        "compile.",
        [
            "backend",
            "kwargs",
            "free_activation",
            "free_activation_threshold",
            "offload_activation",
            "offload_activation_pin_memory",
            "offload_opt_states",
            "offload_parameters",
            "double_buffer",
            "symmetric_memory",
            "debug_log",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_int_input_tensors",
            "keep_all_input_tensors",
        ],
        "units are compiled by torch.compile with its defaults",
    ),
}

_ZERO_REFUSED = {
    **refused(
        {
            _ZERO + "zero_quantized_weights": "would change the result by rounding weights on their"
            " way; remove it",
            _ZERO + "zero_quantized_nontrainable_weights": "would round the frozen weights; remove"
            " it",
            _ZERO + "zero_quantized_gradients": "would change the result by rounding gradients on"
            " their way; remove it, or set communication_data_type bf16",
            _ZERO + "zeropp_loco_param": "belongs to quantized gradients, which are not available;"
            " remove it",
            _ZERO + "zenflow": "would update weights with gradients of earlier steps; remove it",
            _ZERO + "mics_hierarchical_params_gather": "belongs to MiCS; remove it and set"
            " --replicas to the number of groups of processes",
            "compile.passes": "asks for sequence or tensor parallelism, which is not available;"
            " remove it",
        },
        [],
    ),
    **refused(
        {
            _ZERO + "zero_hpz_partition_size": "asks for a second copy of the weights on each"
            " machine, which is not available; remove it"
        },
        1,
    ),
    **refused(
        {
            _ZERO + "mics_shard_size": "asks for shards within groups of processes; remove it and"
            " set --replicas to the number of such groups"
        },
        -1,
    ),
}

ZERO_KEYS = {**_ZERO_USED, **_ZERO_NO_EFFECT, **_ZERO_REFUSED}
