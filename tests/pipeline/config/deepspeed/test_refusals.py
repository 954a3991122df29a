"""Values of used keys that can't be used: one sentence that starts with the key and the file."""

from typing import Any

import pytest

from pipeline.config.deepspeed.optim import (
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
)
from pipeline.config.deepspeed.read import read_deepspeed_config
from pipeline.errors import ConfigError

FILE = "in the DeepSpeed configuration"


def refusal(content: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        read_deepspeed_config(content)
    return str(error.value)


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


def optimizer(name: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def scheduler(name: str = "WarmupLR", **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


def model(content: dict[str, Any]) -> dict[str, Any]:
    return dict(read_deepspeed_config(content).model)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (zero(stage=4), f"zero_optimization.stage {FILE} must be one of 0, 1, 2, 3, got 4"),
        (zero(stage="2"), f"zero_optimization.stage {FILE} must be one of 0, 1, 2, 3, got '2'"),
        (zero(stage=True), f"zero_optimization.stage {FILE} must be one of 0, 1, 2, 3, got True"),
        (
            zero(offload_optimizer={"device": "disk"}),
            f"zero_optimization.offload_optimizer.device {FILE} must be one of none, cpu, nvme, got"
            " 'disk'",
        ),
        (
            zero(offload_optimizer="cpu"),
            f"zero_optimization.offload_optimizer {FILE} must hold settings, {{...}}, got 'cpu'",
        ),
        (
            zero(stage=3, offload_optimizer={"device": "nvme"}),
            f"zero_optimization.offload_optimizer.device {FILE} is nvme:"
            " zero_optimization.offload_optimizer.nvme_path must name a directory on a fast local"
            " disk",
        ),
        (
            zero(
                stage=3,
                offload_optimizer={"device": "nvme", "nvme_path": "/a"},
                offload_param={"device": "nvme", "nvme_path": "/b"},
            ),
            f"zero_optimization.offload_optimizer.nvme_path {FILE} is /a and"
            " zero_optimization.offload_param.nvme_path is /b; use one directory for both",
        ),
        (
            zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": ""}),
            f"zero_optimization.offload_optimizer.nvme_path {FILE} must be text, got ''",
        ),
        (
            zero(stage=2, offload_param={"device": "cpu"}),
            f"zero_optimization.offload_param {FILE} needs zero_optimization.stage 3, got 2; remove"
            " one",
        ),
        (
            zero(
                stage=3, offload_optimizer={"pin_memory": True}, offload_param={"pin_memory": False}
            ),
            f"zero_optimization.offload_optimizer.pin_memory {FILE} contradicts"
            " zero_optimization.offload_param.pin_memory; use one value for all",
        ),
        (
            zero(cpu_offload=True, offload_optimizer={"device": "cpu"}),
            f"zero_optimization.cpu_offload {FILE} says the same as"
            " zero_optimization.offload_optimizer; keep the latter",
        ),
        (
            zero(stage3_prefetch_bucket_size=-1),
            f"zero_optimization.stage3_prefetch_bucket_size {FILE} must be a whole number of at"
            " least 0, got -1",
        ),
        (
            {"compile": {"deepcompile": "yes"}},
            f"compile.deepcompile {FILE} must be true or false, got 'yes'",
        ),
        (
            {"gradient_accumulation": 2, "gradient_accumulation_steps": 2},
            "the DeepSpeed configuration has gradient_accumulation_steps twice, under two names;"
            " keep one",
        ),
        (
            {"train_batch_size": 8.5},
            f"train_batch_size {FILE} must be a whole number of at least 1, got 8.5",
        ),
        (
            {"train_batch_size": True},
            f"train_batch_size {FILE} must be a whole number of at least 1, got True",
        ),
        (
            {"train_micro_batch_size_per_gpu": 0},
            f"train_micro_batch_size_per_gpu {FILE} must be a whole number of at least 1, got 0",
        ),
    ],
)
def test_sharding_and_sizes(content: dict[str, Any], sentence: str) -> None:
    assert refusal(content) == sentence


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            f"fp16.enabled {FILE} and bf16.enabled are both true; keep one",
        ),
        (
            {"bf16": {"enabled": True}, "bfloat16": {"enabled": True}},
            "the DeepSpeed configuration has bf16 and bfloat16, which are the same; keep bf16",
        ),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
            f"data_types.param_dtype {FILE} is fp16, but bf16.enabled is true; keep one",
        ),
        ({"bf16": True}, f"bf16 {FILE} must hold settings, {{...}}, got True"),
        (
            {"fp16": {"enabled": True, "loss_scale": float("nan")}},
            f"fp16.loss_scale {FILE} must be a number of at least 0, got nan",
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": -1}},
            f"fp16.loss_scale {FILE} must be a number of at least 0, got -1",
        ),
        (
            {"fp16": {"enabled": True, "loss_scale": 10**400}},
            f"fp16.loss_scale {FILE} must be a number of at least 0, got 1{'0' * 400}",
        ),
        (
            {"fp16": {"enabled": True, "loss_scale_window": 0}},
            f"fp16.loss_scale_window {FILE} must be a whole number of at least 1, got 0",
        ),
        (
            {"fp16": {"enabled": True, "min_loss_scale": 0}},
            f"fp16.min_loss_scale {FILE} must be above 0, got 0",
        ),
    ],
)
def test_precision(content: dict[str, Any], sentence: str) -> None:
    assert refusal(content) == sentence


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (optimizer("Adan"), "is Adan, which is not an optimizer here; did you mean Adam?"),
        (
            optimizer("Sophia"),
            "is Sophia, which is not an optimizer here; use one of AdamW, Adam, Adagrad, Adadelta,"
            " Adamax, ASGD, NAdam, RAdam, Rprop, RMSprop, SGD",
        ),
        (
            optimizer("Lamb"),
            "is Lamb, which needs the norm of each layer, which sharded flat vectors don't have;"
            " use AdamW",
        ),
        (
            optimizer("OneBitAdam", freeze_step=400),
            "is OneBitAdam, which compresses gradients into an approximation; use AdamW",
        ),
    ],
)
def test_optimizers_that_are_not_here(content: dict[str, Any], sentence: str) -> None:
    assert refusal(content) == f"optimizer.type {FILE} {sentence}"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"optimizer": {"params": {"lr": 1}}}, f'optimizer {FILE} needs a type, such as "AdamW"'),
        (
            optimizer(lr="fast"),
            f"optimizer.params.lr {FILE} must be a number of at least 0, got 'fast'",
        ),
        (
            optimizer(betas=[0.9]),
            f"optimizer.params.betas {FILE} must be a list of two numbers, got [0.9]",
        ),
        (
            optimizer(weigth_decay=0.1),
            f"optimizer.params.weigth_decay {FILE} is not a parameter of AdamW; did you mean"
            " weight_decay?",
        ),
        (
            optimizer("SGD", betas=[0.9, 0.99]),
            f"optimizer.params.betas {FILE} is not a parameter of SGD; it has lr, weight_decay,"
            " max_grad_norm, momentum, dampening, nesterov",
        ),
        (
            optimizer(bias_correction=False),
            f"optimizer.params.bias_correction {FILE} can only be true here; remove it",
        ),
        (
            {**optimizer(max_grad_norm=2.0), "gradient_clipping": 1.0},
            f"gradient_clipping {FILE} is 1, but optimizer.params.max_grad_norm is 2; keep one",
        ),
        (
            {"scheduler": {"params": {"warmup_num_steps": 1}}},
            f'scheduler {FILE} needs a type, such as "WarmupLR"',
        ),
        (
            scheduler("WarmUpCosine"),
            f"scheduler.type {FILE} is WarmUpCosine, which is not a schedule here; did you mean"
            " WarmupCosineLR?",
        ),
        (
            scheduler("StepLR"),
            f"scheduler.type {FILE} is StepLR, which is not a schedule here; use one of WarmupLR,"
            " WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, linear, cosine,"
            " cosine_with_restarts, polynomial, constant, constant_with_warmup, noam, exponential",
        ),
        (
            scheduler(warmup_steps=10),
            f"scheduler.params.warmup_steps {FILE} is not a parameter of WarmupLR; did you mean"
            " warmup_num_steps?",
        ),
        (
            scheduler("OneCycle", total_num_steps=10),
            f"scheduler.params.total_num_steps {FILE} is not a parameter of OneCycle; it has"
            " cycle_min_lr, cycle_max_lr, decay_lr_rate, cycle_first_step_size,"
            " cycle_second_step_size, cycle_first_stair_count, cycle_second_stair_count,"
            " decay_step_size, cycle_momentum, cycle_min_mom, cycle_max_mom, decay_mom_rate",
        ),
        (
            scheduler(warmup_max_lr=[1e-3, 1e-4]),
            f"scheduler.params.warmup_max_lr {FILE} must be one value for all parameters, got"
            " [0.001, 0.0001]",
        ),
        (
            scheduler(warmup_type="cubic"),
            f"scheduler.params.warmup_type {FILE} must be one of log, linear, got 'cubic'",
        ),
        (
            scheduler(warmup_min_lr=1e-4, warmup_max_lr=1e-5),
            f"scheduler.params.warmup_min_lr {FILE} is 0.0001, above the peak rate 1e-05; lower it",
        ),
        (
            scheduler(warmup_min_lr=1e-4),
            f"scheduler.params.warmup_min_lr {FILE} is a share of the peak rate here; add"
            " optimizer.params.lr",
        ),
        (
            scheduler("OneCycle", cycle_max_lr=1e-3),
            f"scheduler {FILE} is OneCycle, which needs cycle_min_lr and cycle_max_lr",
        ),
        (
            scheduler("OneCycle", cycle_min_lr=0, cycle_max_lr=1, decay_mom_rate=0.1),
            f"scheduler.params.decay_mom_rate {FILE} can only be 0 here; remove it",
        ),
        (
            scheduler(last_batch_iteration=7),
            f"scheduler.params.last_batch_iteration {FILE} can only be -1: a resumed run knows its"
            " step; remove it",
        ),
    ],
)
def test_optimizer_and_schedule(content: dict[str, Any], sentence: str) -> None:
    assert refusal(content) == sentence


@pytest.mark.parametrize("name", REFUSED_OPTIMIZERS)
def test_a_refused_optimizer_is_named_with_its_reason(name: str) -> None:
    assert refusal(optimizer(name.lower())) == (
        f"optimizer.type {FILE} is {name.lower()}, which {REFUSED_OPTIMIZERS[name]}"
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_torchs_of_the_same_name(name: str) -> None:
    import torch

    params = {"adam_w_mode": False} if name == "Adam" else {}

    assert model(optimizer(name.lower(), **params))["optim.name"] == name
    optimizer_class = getattr(torch.optim, name)
    parameter = torch.nn.Parameter(torch.zeros(2))
    defaults = optimizer_class([parameter], lr=0.1).defaults
    assert set(OPTIMIZERS[name]) <= defaults.keys()


@pytest.mark.parametrize(
    ("params", "name"),
    [({}, "AdamW"), ({"adam_w_mode": True}, "AdamW"), ({"adam_w_mode": False}, "Adam")],
)
def test_deepspeeds_adam_decouples_weight_decay(params: dict[str, Any], name: str) -> None:
    assert model(optimizer("Adam", torch_adam=True, **params))["optim.name"] == name
    assert model(optimizer("AdamW", **params))["optim.name"] == "AdamW"


def test_clipping_may_stand_with_the_optimizer() -> None:
    assert model(optimizer(max_grad_norm=2))["optim.max_grad_norm"] == 2.0
    assert model({**optimizer(max_grad_norm=2), "gradient_clipping": 2})["optim.max_grad_norm"] == 2


@pytest.mark.parametrize(
    ("content", "precision"),
    [
        ({"fp16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "auto"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"data_types": {"param_dtype": "fp16"}}, "fp16"),
        ({"bf16": {"enabled": True}, "data_types": {"param_dtype": "bf16"}}, "bf16"),
        ({}, None),
    ],
)
def test_the_precision_of_a_file(content: dict[str, Any], precision: str | None) -> None:
    settings = read_deepspeed_config(content, given={"precision": "auto"}).model

    assert settings.get("precision") == precision


def test_the_loss_scale_of_a_file_without_fp16_is_left_alone() -> None:
    content = {"fp16": {"enabled": False, "loss_scale_window": 0}, "bf16": {"enabled": True}}

    assert model(content) == {"precision": "bf16"}


def test_a_switch_for_zero_is_stage_1() -> None:
    assert model({"zero_optimization": True}) == {"zero_stage": 1}
    assert model({"zero_optimization": False}) == {"zero_stage": 0}


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_follow_the_optimizer_to_the_host_from_stage_2(stage: int) -> None:
    content = {"device": "cpu"}

    assert "zero.offload.gradients" not in model(zero(stage=stage, offload_optimizer=content))
    assert model(zero(stage=2, offload_optimizer=content))["zero.offload.gradients"] == "cpu"
