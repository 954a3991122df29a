"""Every key of DeepSpeed's configuration that we know, and what becomes of it here.

Key names are DeepSpeed 0.19's, with the older ones that files in use still have.
`docs/deepspeed.md` shows this table.
"""

from pipeline.config.deepspeed.key import Key, no_effect, refused, used
from pipeline.config.deepspeed.other_keys import MODEL_KEYS, REPORTING_KEYS
from pipeline.config.deepspeed.zero_keys import ZERO_KEYS

_BATCH = used(
    {
        "train_batch_size": "batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "gradient_accumulation_steps": "batch_size or micro_batch_size, whichever is missing",
        "gradient_accumulation": "gradient_accumulation_steps, by its short name",
    }
)

_OPTIM = {
    **used(
        {
            "gradient_clipping": "optim.max_grad_norm; 0 is null",
            "optimizer.type": "optim.name",
            "optimizer.params": "optim.lr, betas, eps, weight_decay; the rest in optim.params",
            "scheduler.type": "optim.schedule",
            "scheduler.params": "optim.lr, warmup_steps, final_lr_ratio; the rest in"
            " optim.schedule_params",
        }
    ),
    **no_effect("optimizer.", ["legacy_fusion"], "parameters always lie in flat vectors"),
    **no_effect(
        "",
        ["zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"],
        "the optimizer is torch's own, at every stage and on every device",
    ),
}

_PRECISION = {
    **used(
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
            "communication_data_type": "zero.reduce_dtype; bfp16 is bf16",
        }
    ),
    **no_effect("", ["fp32_allreduce"], "gradients travel in fp32 unless they are to in bf16"),
    **no_effect("fp16.", ["auto_cast"], "a language model's inputs are token ids"),
    **no_effect(
        "bf16.",
        ["immediate_grad_update"],
        "gradients accumulate in fp32 as soon as they are computed",
    ),
    **no_effect(
        "bf16.",
        ["check_grad_overflow", "check_overflow"],
        "a gradient that is not finite always skips the step",
    ),
    **no_effect(
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
    **no_effect("data_types.", ["grad_accum_dtype"], "gradients always accumulate in fp32"),
    **refused(
        {
            "amp": "needs NVIDIA's Apex, which is not used here; remove it and enable bf16 or fp16",
            "torch_autocast": "is not used here, where weights below fp32 have fp32 masters; remove"
            " it and enable bf16 or fp16",
            "fp16.fp16_master_weights_and_grads": "would lose what fp32 master weights are for;"
            " remove it, and take offload_optimizer where memory is short",
            "bf16.bf16_master_weights_and_grads": "would lose what fp32 master weights are for;"
            " remove it, and take offload_optimizer where memory is short",
            "bf16.bf16_optimizer_states": "would round Adam's moments, which is a setting of"
            " ours; remove it, and say optim.moments bf16 or 8bit where memory is short",
            "data_types.buffer_dtype": "would round buffers such as rotary frequencies, which stay"
            " as the model has them; remove it",
        }
    ),
}

_GRADIENTS = {
    **no_effect(
        "",
        ["prescale_gradients", "gradient_predivide_factor"],
        "losses are divided by the tokens of the whole step before backward, so gradients are"
        " summed",
    ),
    **no_effect("", ["sparse_gradients"], "embedding gradients are part of the flat vectors"),
    **no_effect(
        "",
        ["disable_allgather", "graph_harvesting", "use_data_before_expert_parallelism"],
        "it steers DeepSpeed's own engine",
    ),
    **no_effect(
        "", ["seq_parallel_communication_data_type"], "sequences are not split among processes"
    ),
    **refused(
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

KEYS: dict[str, Key] = {
    **_BATCH,
    **_OPTIM,
    **_PRECISION,
    **ZERO_KEYS,
    **_GRADIENTS,
    **REPORTING_KEYS,
    **MODEL_KEYS,
}
"""Dotted key, or the dotted name of a section that has one fate, to what becomes of it."""

ALIASES = {
    "gradient_accumulation": "gradient_accumulation_steps",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
}
"""Other names of a used key."""
