import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.deepspeed.read import read_deepspeed_config
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[4]

OURS = {
    "batch_size": 32,
    "micro_batch_size": 8,
    "precision": "bf16",
    "optim.lr": 1e-5,
    "optim.betas": (0.9, 0.95),
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.1,
    "optim.max_grad_norm": 1.0,
}

HUGGING_FACE_ZERO2 = """
{
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "allgather_partitions": true,
        "allgather_bucket_size": 2e8,
        "overlap_comm": true,
        "reduce_scatter": true,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": true
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}
"""

HUGGING_FACE_ZERO3 = """
{
    "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500,
             "initial_scale_power": 12, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500,
                   "total_num_steps": "auto"}
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
                              "buffer_count": 4, "fast_init": false},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true,
                          "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
        "aio": null,
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1,
            "single_submit": false, "overlap_events": true},
    "train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5
}
"""

DEEPSPEED_CHAT: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "fp16": {"enabled": True, "loss_scale_window": 100},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": True,
        "max_out_tokens": 512,
        "inference_tp_size": 1,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    },
    "tensorboard": {
        "enabled": True,
        "output_path": "step1_tensorboard/ds_tensorboard_logs/",
        "job_name": "step1_model_tensorboard",
    },
}


def written(directory: Path, text: str) -> Path:
    path = directory / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(source: Path | dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read_deepspeed_config(source, **more)
    return str(error.value)


def test_hugging_faces_stage_2_file_takes_our_settings_for_auto(tmp_path: Path) -> None:
    path = written(tmp_path, HUGGING_FACE_ZERO2)

    settings = read_deepspeed_config(path, world=2, given=OURS)

    assert settings.model == {
        "zero_stage": 2,
        "zero.offload.optimizer": "cpu",
        "zero.offload.gradients": "cpu",
        "zero.offload.pin_memory": True,
        "precision": "bf16",
        "optim.name": "AdamW",
        "optim.lr": 1e-5,
        "optim.betas": (0.9, 0.95),
        "optim.eps": 1e-8,
        "optim.weight_decay": 0.1,
        "optim.max_grad_norm": 1.0,
        "optim.schedule": "warmup",
        "optim.final_lr_ratio": 0.0,
    }
    assert settings.step == {"batch_size": 32, "micro_batch_size": 8}
    assert settings.notice() == (
        f"these keys of {path} have no effect here:\n"
        "  zero_optimization.allgather_partitions, zero_optimization.allgather_bucket_size,"
        " zero_optimization.overlap_comm, zero_optimization.reduce_scatter,"
        " zero_optimization.reduce_bucket_size, zero_optimization.contiguous_gradients: a"
        " transformer block is one contiguous bucket, gathered and reduced by one collective\n"
        "  steps_per_print: metrics.jsonl gets a line every log_every steps\n"
        "  wall_clock_breakdown: metrics.jsonl always has tokens per second"
    )


def test_hugging_faces_stage_3_file_with_nvme(tmp_path: Path) -> None:
    text = HUGGING_FACE_ZERO3.replace('"aio": null,', "")

    settings = read_deepspeed_config(written(tmp_path, text), world=4, given={"total_steps": 9000})

    assert settings.model == {
        "zero_stage": 3,
        "zero.offload.optimizer": "nvme",
        "zero.offload.gradients": "cpu",
        "zero.offload.params": "nvme",
        "zero.offload.nvme_path": "/local_nvme",
        "zero.offload.pin_memory": True,
        "precision": "fp16",
        "fp16.loss_scale": 0.0,
        "fp16.initial_scale_power": 12,
        "fp16.loss_scale_window": 500,
        "fp16.hysteresis": 2,
        "fp16.min_loss_scale": 1.0,
        "optim.name": "AdamW",
        "optim.lr": 3e-5,
        "optim.betas": (0.8, 0.999),
        "optim.eps": 1e-8,
        "optim.weight_decay": 3e-7,
        "optim.max_grad_norm": 0.5,
        "optim.schedule": "warmup_decay",
        "optim.warmup_steps": 500,
        "optim.final_lr_ratio": 0.0,
        "optim.schedule_params": {"warmup_min_ratio": 0.0, "total_num_steps": 9000},
    }
    assert settings.step == {"batch_size": 64, "micro_batch_size": 4}


def test_a_section_in_the_wrong_place_is_pointed_to_the_right_one(tmp_path: Path) -> None:
    path = written(tmp_path, HUGGING_FACE_ZERO3)

    assert refusal(path) == (
        f"zero_optimization.aio in {path} is not a key of DeepSpeed's configuration; did you mean"
        " aio?"
    )


def test_deepspeed_chats_configuration() -> None:
    settings = read_deepspeed_config(DEEPSPEED_CHAT, world=8)

    assert settings.model == {
        "zero_stage": 2,
        "zero.offload.optimizer": "none",
        "zero.offload.params": "none",
        "precision": "fp16",
        "fp16.loss_scale_window": 100,
        "optim.max_grad_norm": 1.0,
    }
    assert settings.step == {
        "batch_size": 64,
        "micro_batch_size": 4,
        "trackers": ("tensorboard",),
    }
    assert set(settings.no_effect) == {
        "steps_per_print",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.memory_efficient_linear",
        "prescale_gradients",
        "wall_clock_breakdown",
        "hybrid_engine.enabled",
        "hybrid_engine.max_out_tokens",
        "hybrid_engine.release_inference_cache",
        "hybrid_engine.pin_parameters",
        "hybrid_engine.tp_gather_partition_size",
        "tensorboard.output_path",
        "tensorboard.job_name",
    }


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    settings = read_deepspeed_config(written(tmp_path, "{}"))

    assert (settings.model, settings.step, settings.notice()) == ({}, {}, None)


def test_a_section_that_is_off_is_not_worth_a_notice() -> None:
    off = {"enabled": False}
    content = {
        "tensorboard": {**off, "job_name": "x"},
        "flops_profiler": {**off, "profile_step": 1},
        "amp": off,
        "elasticity": {**off, "min_gpus": 4},
    }

    settings = read_deepspeed_config(content)

    assert (settings.step, settings.no_effect) == ({}, {})


def test_comments_and_trailing_commas_are_read_as_deepspeed_does(tmp_path: Path) -> None:
    text = """{
        // offload first
        "zero_optimization": {"stage": 3, "offload_param": {  # all of it
            "device": "nvme", "nvme_path": "/a//b#c,]",}},
        "_comment": "as JSON files have them",
        /* two
           lines */ "gradient_clipping": 0.0,
    }"""

    model = read_deepspeed_config(written(tmp_path, text)).model

    assert model["zero.offload.nvme_path"] == "/a//b#c,]"
    assert model["optim.max_grad_norm"] is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a": 1,\n "b" 2}', "is not valid JSON: Expecting ':' delimiter in line 2, column 6"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "has enabled twice in one section; keep"),
        ("[1]", "must hold one JSON object of settings, {...}"),
        ("[" * 100_000, "is nested too deeply for a DeepSpeed configuration"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = written(tmp_path, text)

    assert refusal(path).startswith(f"{path} {sentence}")


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.json"

    assert refusal(missing) == f"{missing}: no such DeepSpeed configuration file"
    assert refusal(tmp_path).startswith(f"{tmp_path} can't be read: ")


def test_every_auto_that_nothing_resolves_is_listed(tmp_path: Path) -> None:
    path = written(tmp_path, HUGGING_FACE_ZERO2)
    given = {name: value for name, value in OURS.items() if not name.startswith("optim.")}

    assert refusal(path, given=given) == (
        f"{path} leaves optimizer.params.lr, optimizer.params.betas, optimizer.params.eps,"
        ' optimizer.params.weight_decay, gradient_clipping, scheduler.params.warmup_max_lr "auto",'
        " which nothing here resolves; write the values into the file"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_optimization", {"stage": "auto"}),
        ("optimizer", {"type": "auto"}),
        ("scheduler", {"type": "auto"}),
    ],
)
def test_a_key_that_has_no_auto_is_listed(key: str, value: object) -> None:
    assert '"auto", which nothing here resolves' in refusal({key: value}, given=OURS)


BATCH = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({BATCH: "auto", MICRO: "auto", STEPS: "auto"}, (32, 8)),
        ({BATCH: "auto", MICRO: "auto", STEPS: 3}, (48, 8)),
        ({BATCH: "auto", MICRO: 4, STEPS: "auto"}, (32, 4)),
        ({BATCH: "auto", MICRO: 4, STEPS: 3}, (24, 4)),
        ({BATCH: 64, MICRO: "auto", STEPS: "auto"}, (64, 8)),
        ({BATCH: 64, MICRO: "auto", STEPS: 2}, (64, 16)),
        ({BATCH: 64, MICRO: 4, STEPS: "auto"}, (64, 4)),
        ({BATCH: 64, STEPS: "auto"}, (64, 32)),
        ({BATCH: 64}, (64, 32)),
        ({MICRO: 4}, (8, 4)),
        ({MICRO: 4, "gradient_accumulation": 3}, (24, 4)),
    ],
)
def test_auto_batch_sizes_fit_those_that_are_written(
    sizes: dict[str, object], expected: tuple[int, int]
) -> None:
    step = read_deepspeed_config(sizes, world=2, given=OURS).step

    assert (step["batch_size"], step["micro_batch_size"]) == expected


def test_our_own_sizes_need_no_common_divisor() -> None:
    sizes: dict[str, object] = {BATCH: "auto", MICRO: "auto", STEPS: "auto"}
    given = {"batch_size": 10, "micro_batch_size": 4}

    assert read_deepspeed_config(sizes, world=3, given=given).step == given


def test_batch_sizes_that_do_not_agree_name_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({BATCH: 32, MICRO: 4, STEPS: 3}))

    assert refusal(path, world=2) == (
        f"{path}: train_batch_size 32 is not train_micro_batch_size_per_gpu (4) x"
        " gradient_accumulation_steps (3) x 2 processes, which is 24; drop one of the three and it"
        " follows from the others"
    )


def test_reading_a_file_imports_nothing_heavy() -> None:
    program = (
        "import sys, pipeline.config.deepspeed.read, pipeline.engine.memory,"
        " pipeline.config.zero; print(*sys.modules)"
    )

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"torch", "transformers", "datasets", "numpy", "peft"} & set(loaded)
