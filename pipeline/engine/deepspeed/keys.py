"""Every key of DeepSpeed's configuration that we know, and what becomes of it here.

Key names are DeepSpeed 0.19's, with the older ones that files in use still have.
`docs/deepspeed.md` shows this table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Fate = Literal["used", "no effect", "refused"]


@dataclass(frozen=True)
class Key:
    """What becomes of one key, or of a whole section."""

    fate: Fate

    text: str
    """Used: the setting of ours that it gives. No effect: why. Refused: why, and the mend."""

    neutral: tuple[object, ...] = ()
    """Values of a refused key that ask for nothing, and pass."""

    def asks_for_nothing(self, value: object) -> bool:
        """Whether `value` leaves the feature off: `{"enabled": false}`, or neutral throughout."""
        if isinstance(value, Mapping):
            if "enabled" in value:
                return value["enabled"] in (None, False, "auto")
            return all(self.asks_for_nothing(inner) for inner in value.values())
        return value in self.neutral


def _used(pairs: Mapping[str, str]) -> dict[str, Key]:
    return {key: Key("used", text) for key, text in pairs.items()}


def _no_effect(prefix: str, names: Iterable[str], reason: str) -> dict[str, Key]:
    return {prefix + name: Key("no effect", reason) for name in names}


def _refused(pairs: Mapping[str, str], *neutral: object) -> dict[str, Key]:
    return {key: Key("refused", text, (None, False, *neutral)) for key, text in pairs.items()}


_ZERO = "zero_optimization."
_OPTIMIZER = _ZERO + "offload_optimizer."
_PARAM = _ZERO + "offload_param."

_BATCH = _used(
    {
        "train_batch_size": "batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "gradient_accumulation_steps": "batch_size or micro_batch_size, whichever is missing",
        "gradient_accumulation": "gradient_accumulation_steps, by its short name",
    }
)

_OPTIM = {
    **_used(
        {
            "gradient_clipping": "optim.max_grad_norm; 0 is null",
            "optimizer.type": "optim.name",
            "optimizer.params": "optim.lr, betas, eps, weight_decay; the rest in optim.params",
            "scheduler.type": "optim.schedule",
            "scheduler.params": "optim.lr, warmup_steps, final_lr_ratio; the rest in"
            " optim.schedule_params",
        }
    ),
    **_no_effect("optimizer.", ["legacy_fusion"], "parameters always lie in flat vectors"),
    **_no_effect(
        "",
        ["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"],
        "the optimizer is torch's own, at every stage and on every device",
    ),
}

_PRECISION = {
    **_used(
        {
            "fp16.enabled": "precision fp16",
            "fp16.loss_scale": "fp16.loss_scale; 0 is dynamic",
            "fp16.initial_scale_power": "fp16.initial_scale_power",
            "fp16.loss_scale_window": "fp16.loss_scale_window",
            "fp16.hysteresis": "fp16.hysteresis",
            "fp16.consecutive_hysteresis": "fp16.consecutive_hysteresis",
            "fp16.min_loss_scale": "fp16.min_loss_scale",
            "bf16.enabled": "precision bf16",
            "data_types.param_dtype": "precision",
        }
    ),
    **_no_effect(
        "", ["communication_data_type", "fp32_allreduce"], "gradients travel and add up in fp32"
    ),
    **_no_effect("fp16.", ["auto_cast"], "a language model's inputs are token ids"),
    **_no_effect(
        "bf16.",
        ["immediate_grad_update"],
        "gradients accumulate in fp32 as soon as they are computed",
    ),
    **_no_effect(
        "bf16.",
        ["check_grad_overflow", "check_overflow"],
        "a gradient that is not finite always skips the step",
    ),
    **_no_effect(
        "bf16.",
        [
            "loss_scale",
            "loss_scale_window",
            "initial_scale_power",
            "hysteresis",
            "consecutive_hysteresis",
            "min_loss_scale",
            "auto_cast",
        ],
        "bf16 has the range of fp32 and needs no loss scale",
    ),
    **_no_effect("data_types.", ["grad_accum_dtype"], "gradients always accumulate in fp32"),
    **_refused(
        {
            "amp": "needs NVIDIA's Apex, which is not used here; remove it and enable bf16 or fp16",
            "torch_autocast": "is not used here, where weights below fp32 have fp32 masters; remove"
            " it and enable bf16 or fp16",
            "fp16.fp16_master_weights_and_grads": "would lose what fp32 master weights are for;"
            " remove it, and take offload_optimizer where memory is short",
            "bf16.bf16_master_weights_and_grads": "would lose what fp32 master weights are for;"
            " remove it, and take offload_optimizer where memory is short",
            "bf16.bf16_optimizer_states": "would round Adam's moments, which are fp32 here; remove"
            " it, and take offload_optimizer where memory is short",
            "data_types.buffer_dtype": "would round buffers such as rotary frequencies, which stay"
            " as the model has them; remove it",
        }
    ),
}

_ZERO_USED = _used(
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
    **_no_effect(
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
    **_no_effect(
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
    **_no_effect(
        _ZERO,
        [
            "stage3_gather_16bit_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ],
        "a saved model is always whole",
    ),
    **_no_effect(
        _ZERO,
        ["elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint"],
        "checkpoints have a format of their own, with fp32 masters",
    ),
    **_no_effect(
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
    **_no_effect(
        _OPTIMIZER,
        ["buffer_count", "pipeline", "pipeline_read", "pipeline_write", "fast_init"],
        "offloaded state is read and written unit by unit, with two buffers",
    ),
    **_no_effect(
        _OPTIMIZER,
        ["ratio", "super_offload", "cpuadam_cores_perc"],
        "all of the optimizer state is offloaded, and torch's threads update it",
    ),
    **_no_effect(
        _PARAM,
        ["buffer_count", "buffer_size", "max_in_cpu"],
        "offloaded weights are read unit by unit, with two buffers",
    ),
    **_no_effect(
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
    **_no_effect(
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
    **_refused(
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
            _ZERO + "mics_hierarchical_params_gather": "belongs to MiCS, which is not available;"
            " remove it",
            "compile.passes": "asks for sequence or tensor parallelism, which is not available;"
            " remove it",
        },
        [],
    ),
    **_refused(
        {
            _ZERO + "zero_hpz_partition_size": "asks for a second copy of the weights on each"
            " machine, which is not available; remove it"
        },
        1,
    ),
    **_refused(
        {
            _ZERO + "mics_shard_size": "asks for shards within groups of processes, which is not"
            " available; remove it"
        },
        -1,
    ),
}

_GRADIENTS = {
    **_no_effect(
        "",
        ["prescale_gradients", "gradient_predivide_factor"],
        "losses are divided by the tokens of the whole step before backward, so gradients are"
        " summed",
    ),
    **_no_effect("", ["sparse_gradients"], "embedding gradients are part of the flat vectors"),
    **_no_effect(
        "",
        ["disable_allgather", "graph_harvesting", "use_data_before_expert_parallelism"],
        "it steers DeepSpeed's own engine",
    ),
    **_no_effect(
        "", ["seq_parallel_communication_data_type"], "sequences are not split among processes"
    ),
    **_refused(
        {
            "gradient_allreduce_op": "must be mean: losses are divided by the tokens of the whole"
            " step, over all processes; remove it",
        },
        "mean",
        "Mean",
        "MEAN",
    ),
    "managed_gradient_accumulation": Key(
        "refused",
        "can't be false: the step's loop accumulates micro-batches itself; remove it",
        (None, True),
    ),
}

_REPORTING = {
    **_used({"tensorboard.enabled": "trackers tensorboard", "wandb.enabled": "trackers wandb"}),
    **_no_effect("", ["steps_per_print"], "metrics.jsonl gets a line every log_every steps"),
    **_no_effect(
        "",
        [
            "wall_clock_breakdown",
            "timers.throughput.enabled",
            "timers.throughput.synchronized",
        ],
        "metrics.jsonl always has tokens per second",
    ),
    **_no_effect(
        "", ["memory_breakdown"], "python -m pipeline.engine.memory says what a model needs"
    ),
    **_no_effect(
        "",
        ["dump_state", "log_level", "vocabulary_size"],
        "it steers DeepSpeed's own messages; the resolved settings are in config.yaml",
    ),
    **_no_effect(
        "tensorboard.",
        ["output_path", "job_name"],
        "event files go to the step's output directory",
    ),
    **_no_effect(
        "wandb.",
        ["team", "group", "project"],
        "W&B takes WANDB_ENTITY, WANDB_RUN_GROUP and WANDB_PROJECT from the environment",
    ),
    **_no_effect(
        "csv_monitor.",
        ["enabled", "output_path", "job_name"],
        "metrics.jsonl is always written to the step's output directory",
    ),
    **_no_effect(
        "flops_profiler.",
        [
            "enabled",
            "recompute_fwd_factor",
            "profile_step",
            "module_depth",
            "top_modules",
            "detailed",
            "output_file",
        ],
        "there is no profiler here; torch.profiler can be used on a step's module",
    ),
    **_no_effect(
        "comms_logger.",
        ["enabled", "verbose", "prof_all", "prof_ops", "debug"],
        "there is no log of collectives here",
    ),
    **_refused(
        {"comet": "is not available; remove it and enable tensorboard or wandb"},
    ),
}

_MODEL = {
    **_no_effect(
        "activation_checkpointing.",
        [
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        ],
        "activations are recomputed where gradient_checkpointing is set",
    ),
    **_no_effect(
        "hybrid_engine.",
        [
            "enabled",
            "max_out_tokens",
            "release_inference_cache",
            "pin_parameters",
            "tp_gather_partition_size",
            "enable_cuda_graph",
        ],
        "step 3 generates with its own settings, such as max_new_tokens",
    ),
    **_no_effect("", ["dataloader_drop_last"], "every row is used"),
    **_no_effect(
        "checkpoint.",
        [
            "tag_validation",
            "load_universal",
            "use_node_local_storage",
            "parallel_write.pipeline_stage",
            "checkpoint_serialization",
            "writer",
        ],
        "checkpoints have a format of their own",
    ),
    **_refused(
        {
            "hybrid_engine.inference_tp_size": "asks for generation split among GPUs, which is"
            " step 3's own setting; set it to 1 here and give --ppo.inference_tp_size",
            "sequence_parallel_size": "asks for sequences split among GPUs, which is not available;"
            " set it to 1",
            "tensor_parallel": "asks for layers split among GPUs, which is not available; remove it"
            " and take zero_optimization.stage 3",
        },
        0,
        1,
    ),
    **_refused(
        {
            "expert_parallel": "asks for experts split among GPUs, which is not available; remove"
            " it and take zero_optimization.stage 3",
            "moe": "asks for experts split among GPUs, which is not available; remove it and take"
            " zero_optimization.stage 3",
            "pipeline": "asks for layers split into stages, which is not available; remove it and"
            " take zero_optimization.stage 3",
            "sparse_attention": "is not available; remove it and choose a model with sliding-window"
            " attention",
            "elasticity": "would choose the batch size by the number of GPUs; remove it and set"
            " train_batch_size, which any number of processes can share",
            "autotuning": "is not available; remove it and read python -m pipeline.engine.memory",
            "compression_training": "is not available: models are trained, not compressed; remove"
            " it",
            "quantize_training": "is not available: models are trained, not compressed; remove it",
            "weight_quantization": "is not available: models are trained, not compressed; remove"
            " it",
            "eigenvalue": "belongs to quantized training, which is not available; remove it",
            "progressive_layer_drop": "is not available: every layer runs in every step; remove it",
            "curriculum_learning": "is not available: rows come in an order drawn from the seed;"
            " remove it",
            "data_efficiency": "is not available: rows come in an order drawn from the seed; remove"
            " it",
            "nebula": "is a checkpoint service that is not available; remove it",
            "datastates_ckpt": "is a checkpoint library that is not available; remove it",
        },
    ),
}

KEYS: dict[str, Key] = {
    **_BATCH,
    **_OPTIM,
    **_PRECISION,
    **_ZERO_USED,
    **_ZERO_NO_EFFECT,
    **_ZERO_REFUSED,
    **_GRADIENTS,
    **_REPORTING,
    **_MODEL,
}
"""Dotted key, or the dotted name of a section that has one fate, to what becomes of it."""

ALIASES = {
    "gradient_accumulation": "gradient_accumulation_steps",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
}
"""Other names of a used key."""
