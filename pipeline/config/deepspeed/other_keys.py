"""DeepSpeed's keys of reports, of models and of features that are not here."""

from pipeline.config.deepspeed.key import no_effect, refused, used

REPORTING_KEYS = {
    **used({"tensorboard.enabled": "trackers tensorboard", "wandb.enabled": "trackers wandb"}),
    **no_effect("", ["steps_per_print"], "metrics.jsonl gets a line every log_every steps"),
    **no_effect(
        "",
        [
            "wall_clock_breakdown",
            "timers.throughput.enabled",
            "timers.throughput.synchronized",
        ],
        "metrics.jsonl always has tokens per second",
    ),
    **no_effect(
        "", ["memory_breakdown"], "python -m pipeline.engine.memory says what a model needs"
    ),
    **no_effect(
        "",
        ["dump_state", "log_level", "vocabulary_size"],
        "it steers DeepSpeed's own messages; the resolved settings are in config.yaml",
    ),
    **no_effect(
        "tensorboard.",
        ["output_path", "job_name"],
        "event files go to the step's output directory",
    ),
    **no_effect(
        "wandb.",
        ["team", "group", "project"],
        "W&B takes WANDB_ENTITY, WANDB_RUN_GROUP and WANDB_PROJECT from the environment",
    ),
    **no_effect(
        "csv_monitor.",
        ["enabled", "output_path", "job_name"],
        "metrics.jsonl is always written to the step's output directory",
    ),
    **no_effect(
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
    **no_effect(
        "comms_logger.",
        ["enabled", "verbose", "prof_all", "prof_ops", "debug"],
        "there is no log of collectives here",
    ),
    **refused(
        {"comet": "is not available; remove it and enable tensorboard or wandb"},
    ),
}

MODEL_KEYS = {
    **no_effect(
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
    **no_effect(
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
    **no_effect("", ["dataloader_drop_last"], "every row is used"),
    **no_effect(
        "checkpoint.",
        [
            "tag_validation",
            "load_universal",
            "parallel_write.pipeline_stage",
            "checkpoint_serialization",
            "writer",
        ],
        "checkpoints have a format of their own",
    ),
    **no_effect(
        "checkpoint.",
        ["use_node_local_storage"],
        "local_checkpoints of a step names the directory on each machine's disk",
    ),
    **refused(
        {
            "hybrid_engine.inference_tp_size": "asks for generation split among GPUs, which is"
            " step 3's own setting; set it to 1 here and give --ppo.inference_tp_size",
            "sequence_parallel_size": "asks for sequences split among GPUs, which is not available;"
            " set it to 1",
            "tensor_parallel": "asks for layers split among GPUs, which are settings of the steps"
            " here; remove it and give --sft.parallel.tp, or that of another step",
        },
        0,
        1,
    ),
    **refused(
        {
            "expert_parallel": "asks for experts split among GPUs, which is not available; remove"
            " it and take zero_optimization.stage 3",
            "moe": "asks for experts split among GPUs, which is not available; remove it and take"
            " zero_optimization.stage 3",
            "pipeline": "asks for layers split into stages; remove it and set parallel.pp of the"
            " steps",
            "sparse_attention": "is not available; remove it and choose a model with sliding-window"
            " attention",
            "elasticity": "would choose the batch size by the number of GPUs; remove it and set"
            " train_batch_size, which any number of processes can share",
            "autotuning": "belongs to DeepSpeed's own search; remove it and run train.py --autotune"
            " tune",
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
