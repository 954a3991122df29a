"""GPUs round as the settings say for as long as a step lasts, and CPUs as ever."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.gpu_numerics import gpu_numerics, is_deterministic
from pipeline.models.in_order import in_order
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig


def test_tf32_is_on_within_a_step_alone(tmp_path: Path) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    found: list[bool] = []
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
