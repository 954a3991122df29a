"""Threads, allocators, rounding and random numbers of a process that runs PyTorch."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models.forward.attention import in_order
from pipeline.system.torch_process import (
    gpu_numerics,
    random_state,
    seed_generators,
    set_random_state,
    use_expandable_segments,
)
from step3_ppo.config import PPOConfig


def test_the_allocator_settings_of_a_user_are_kept() -> None:
    environment = {"HOME": "/"}
    assert use_expandable_segments(environment)
    assert environment == {"HOME": "/", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:64"}
        assert not use_expandable_segments(own)
        assert own == {name: "max_split_size_mb:64"}


def test_tf32_is_on_within_a_step_alone() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found: list[object] = []
    for tf32 in (True, False):
        with gpu_numerics(tf32=tf32, deterministic=False):
            found.append(torch.backends.cuda.matmul.allow_tf32)

    assert found == [True, False]
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_one_order_is_that_of_any_model_of_the_step(tmp_path: Path) -> None:
    plain = PPOConfig(output_dir=tmp_path)
    critic = replace(plain.critic, zero=replace(plain.critic.zero, reduction="deterministic"))

    assert not plain.is_deterministic
    assert replace(plain, critic=critic).is_deterministic
    if not torch.cuda.is_available():
        with gpu_numerics(tf32=True, deterministic=True):
            assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_backward_pass_of_attention_has_the_same_bits_again() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    heads = torch.randn(3, 2, 8, 1024, 64, device="cuda", generator=generator).bfloat16()

    def gradients() -> torch.Tensor:
        leaves = [each.clone().requires_grad_() for each in heads]
        out = in_order(partial(scaled_dot_product_attention, is_causal=True), *leaves)
        out.float().square().sum().backward()
        return torch.stack([each.grad for each in leaves if each.grad is not None])

    with gpu_numerics(tf32=True, deterministic=True):
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


def test_a_seed_decides_what_is_drawn() -> None:
    seed_generators(7)
    first = drawn()
    drawn()

    seed_generators(7)

    assert drawn() == first
