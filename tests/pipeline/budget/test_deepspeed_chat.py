"""DeepSpeed-Chat's table of what fits, by our own arithmetic.

Step 3 of OPT with a critic and a reward model of 350M, 256 tokens of prompt and 256 of answer, as
in its blog (Yao et al. 2023, tables 1 to 3).
"""

import pytest

from pipeline.budget.fallbacks import CHECKPOINTING, OFFLOADED, changed, of_models
from pipeline.budget.fit import shortage
from pipeline.budget.machine import Machine, parse_machine
from pipeline.budget.step import step_memory
from pipeline.config import FrozenModelConfig, TrainedModelConfig
from step3_ppo.config import PPOConfig

SMALL = "facebook/opt-350m"

TABLE = {
    "1xV100-32GB+512GB": ("1.3b",),
    "1xA6000-48GB+512GB": ("1.3b", "6.7b"),
    "1xA100-40GB+512GB": ("1.3b", "6.7b"),
    "1xA100-80GB+512GB": ("1.3b", "6.7b", "13b"),
    "8xA100-40GB+2048GB": ("1.3b", "6.7b", "13b", "30b"),
    "8xA100-80GB+2048GB": ("1.3b", "6.7b", "13b", "30b", "66b"),
    "8x8xA100-80GB+2048GB": ("1.3b", "6.7b", "13b", "30b", "66b"),
}
"""Sizes with a time; the others are out of memory, or left out. It also has one of 175B."""

MORE = {"1xV100-32GB+512GB": ("6.7b",)}
"""What fits here beside them."""

SIZES = ("1.3b", "6.7b", "13b", "30b", "66b")
LARGEST = 8
"""Processes of a machine that generate together, at most."""


def fits(size: str, machine: Machine, *, offloads_weights: bool = False) -> bool:
    """Whether one sequence at a time fits, with all that saves memory.

    That is recomputation, optimizer and gradients in main memory, stage 3 on several GPUs, and all
    GPUs of a machine generating together; weights stay on GPUs unless they are offloaded too.
    """
    config = PPOConfig(
        actor=TrainedModelConfig(path=f"facebook/opt-{size}"),
        critic=TrainedModelConfig(path=SMALL),
        reward=FrozenModelConfig(path=SMALL),
        micro_batch_size=1,
        inference_tp_size=min(machine.processes, LARGEST),
    )
    stage = 3 if machine.world > 1 or offloads_weights else 0
    saves = {"zero_stage": stage, **CHECKPOINTING, **OFFLOADED}
    if offloads_weights:
        saves["zero.offload.params"] = "cpu"
    config = changed(config, of_models(config, saves))
    memory = step_memory(config, machine=machine)
    assert not memory.unknown
    return shortage(memory, machine) is None


@pytest.mark.jobs
@pytest.mark.parametrize("machine", TABLE)
def test_the_same_sizes_fit_where_weights_stay_on_gpus(machine: str) -> None:
    found = tuple(size for size in SIZES if fits(size, parse_machine(machine)))

    assert found == TABLE[machine] + MORE.get(machine, ())


@pytest.mark.parametrize(
    ("size", "machine"), [("30b", "1xA100-80GB+1024GB"), ("66b", "8xA100-40GB+2048GB")]
)
def test_with_weights_in_main_memory_the_next_size_fits_too(size: str, machine: str) -> None:
    assert not fits(size, parse_machine(machine))
    assert fits(size, parse_machine(machine), offloads_weights=True)
