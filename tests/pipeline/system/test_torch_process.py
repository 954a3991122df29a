"""Threads, allocators, rounding and random numbers of a process that runs PyTorch."""

import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.errors import ConfigError
from pipeline.models.attention import in_order
from pipeline.system.torch_process import (
    HUGE_PAGE,
    gpu_numerics,
    is_deterministic,
    random_state,
    seed_generators,
    set_compute_threads,
    set_random_state,
    use_expandable_segments,
    zeros_in_huge_pages,
)
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig

PROBE = """
import torch
from pipeline.system.torch_process import use_expandable_segments
use_expandable_segments()
held = [torch.empty(40 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
del held
before = torch.cuda.memory_reserved()
whole = torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_reserved() == before)
"""


def test_the_allocator_settings_of_a_user_are_kept() -> None:
    environment = {"HOME": "/"}
    assert use_expandable_segments(environment)
    assert environment == {"HOME": "/", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:64"}
        assert not use_expandable_segments(own)
        assert own == {name: "max_split_size_mb:64"}


@pytest.mark.gpu
def test_memory_that_was_freed_in_pieces_serves_a_larger_request() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    said = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)

    assert said.stdout.split() == ["True"]


def test_tf32_is_on_within_a_step_alone(tmp_path: Path) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found: list[object] = []
    for tf32 in (True, False):
        with gpu_numerics(SFTConfig(output_dir=tmp_path, tf32=tf32)):
            found.append(torch.backends.cuda.matmul.allow_tf32)

    assert found == [True, False]
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_one_order_is_that_of_any_model_of_the_step(tmp_path: Path) -> None:
    plain = PPOConfig(output_dir=tmp_path)
    critic = replace(plain.critic, zero=replace(plain.critic.zero, reduction="deterministic"))

    assert not is_deterministic(plain)
    assert is_deterministic(replace(plain, critic=critic))
    if not torch.cuda.is_available():
        with gpu_numerics(replace(plain, critic=critic)):
            assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_backward_pass_of_attention_has_the_same_bits_again(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=tmp_path)
    model = replace(config.model, zero=replace(config.model.zero, reduction="deterministic"))
    generator = torch.Generator("cuda").manual_seed(0)
    heads = torch.randn(3, 2, 8, 1024, 64, device="cuda", generator=generator).bfloat16()

    def gradients() -> torch.Tensor:
        leaves = [each.clone().requires_grad_() for each in heads]
        out = in_order(partial(scaled_dot_product_attention, is_causal=True), *leaves)
        out.float().square().sum().backward()
        return torch.stack([each.grad for each in leaves if each.grad is not None])

    with gpu_numerics(replace(config, model=model)):
        assert torch.are_deterministic_algorithms_enabled()
        first = gradients()
        assert all(torch.equal(gradients(), first) for _ in range(5))


def drawn() -> tuple[object, ...]:
    return (
        torch.rand(5).tolist(),
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(4).tolist(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
    )


def test_draws_repeat() -> None:
    drawn()
    state = random_state()
    first = [drawn() for _ in range(3)]

    set_random_state(state)

    assert [drawn() for _ in range(3)] == first


def test_half_of_a_gaussian_pair_is_part_of_the_state() -> None:
    random.gauss(0, 1)
    np.random.randn()  # noqa: NPY002
    state = random_state()
    first = (random.gauss(0, 1), np.random.randn())  # noqa: NPY002

    set_random_state(state)

    assert (random.gauss(0, 1), np.random.randn()) == first  # noqa: NPY002


def test_a_seed_decides_what_is_drawn() -> None:
    seed_generators(7)
    first = drawn()
    drawn()

    seed_generators(7)

    assert drawn() == first


@pytest.mark.parametrize("shape", [(3, 5), (2, 3 * HUGE_PAGE)])
def test_zeros_in_huge_pages_have_the_shape_and_dtype(shape: tuple[int, ...]) -> None:
    zeros = zeros_in_huge_pages(torch.ones(1, dtype=torch.bfloat16), *shape)

    assert zeros.shape == shape
    assert zeros.dtype == torch.bfloat16
    assert not zeros.any()


def test_the_setting_of_threads_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("RLHF_THREADS", "3")
    try:
        set_compute_threads(None)
        assert torch.get_num_threads() == 3
        set_compute_threads(1)
        assert torch.get_num_threads() == 1
        monkeypatch.setenv("RLHF_THREADS", "two")
        with pytest.raises(ConfigError):
            set_compute_threads(None)
    finally:
        torch.set_num_threads(before)
