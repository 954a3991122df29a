"""Threads, allocators, rounding and random numbers of a process that runs PyTorch."""

import mmap
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models.forward.attention import run_reproducibly
from pipeline.system.memory import memory_bytes
from pipeline.system.torch_process import (
    gpu_numerics,
    random_state,
    seed_generators,
    set_random_state,
    use_expandable_segments,
)
from step3_ppo.config import PPOConfig


def test_allocator_settings_of_the_user_are_kept() -> None:
    environment = {"HOME": "/"}
    assert use_expandable_segments(environment)
    assert environment == {"HOME": "/", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        user_environment = {name: "max_split_size_mb:64"}
        assert not use_expandable_segments(user_environment)
        assert user_environment == {name: "max_split_size_mb:64"}


def test_tf32_is_enabled_only_within_the_context() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    for tf32 in (True, False):
        with gpu_numerics(tf32=tf32, deterministic=False):
            assert torch.backends.cuda.matmul.allow_tf32 == tf32

    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_one_deterministic_model_makes_the_step_deterministic(tmp_path: Path) -> None:
    plain = PPOConfig(output_dir=tmp_path)
    critic = replace(plain.critic, zero=replace(plain.critic.zero, reduction="deterministic"))

    assert not plain.is_deterministic
    assert replace(plain, critic=critic).is_deterministic
    if not torch.cuda.is_available():
        with gpu_numerics(tf32=True, deterministic=True):
            assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_backward_pass_of_attention_is_deterministic() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    heads = torch.randn(3, 2, 8, 1024, 64, device="cuda", generator=generator).bfloat16()

    def gradients() -> torch.Tensor:
        leaves = [state.clone().requires_grad_() for state in heads]
        out = run_reproducibly(partial(scaled_dot_product_attention, is_causal=True), *leaves)
        out.float().square().sum().backward()
        return torch.stack([leaf.grad for leaf in leaves if leaf.grad is not None])

    with gpu_numerics(tf32=True, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        first = gradients()
        assert all(torch.equal(gradients(), first) for _ in range(5))


def test_peak_memory_includes_memory_that_was_freed() -> None:
    with mmap.mmap(-1, 2**28) as block:  # an allocator might keep it
        np.frombuffer(block, np.uint8)[::4096] = 1

    assert memory_bytes() - psutil.Process().memory_info().rss > 0.9 * 2**28


def draw() -> tuple[object, ...]:
    return (
        torch.rand(5).tolist(),
        [random.random() for _ in range(3)],
        random.gauss(0, 1),
        np.random.rand(4).tolist(),  # noqa: NPY002
        np.random.randn(),  # noqa: NPY002
    )


def test_seed_and_restored_state_repeat_the_numbers() -> None:
    seed_generators(7)
    first, state, second = draw(), random_state(), draw()

    set_random_state(state)
    assert draw() == second
    seed_generators(7)
    assert draw() == first
