"""Operations of a training step, by hand for OPT and Llama."""

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from pipeline.parallel.mesh import current_mesh
from pipeline.run.utilization import utilization_of

LENGTH, TARGETS = 40, 25


def opt() -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=96,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=128,
            word_embed_proj_dim=32,
            max_position_embeddings=64,
        )
    )


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def operations(model: nn.Module) -> float:
    """Of both passes over one sequence."""
    used = utilization_of(model, peak_tflops=1e-12, mesh=current_mesh())
    return used.seconds([(LENGTH, TARGETS)])


OPT_BLOCKS = 3 * (4 * 32 * 32 + 2 * 32 * 128)
"""Query, key, value, output; up and down."""

LLAMA_BLOCKS = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 80)
"""Query and output, key and value of half the heads; gate, up and down."""


@pytest.mark.parametrize(("model", "blocks"), [(opt, OPT_BLOCKS), (llama, LLAMA_BLOCKS)])
def test_operations_of_a_step_are_six_for_each_weight_and_token_and_attention(
    model: type[nn.Module], blocks: int
) -> None:
    attention = 12 * 3 * 32 * LENGTH * LENGTH  # Chowdhery et al. 2022: 12 L H Q T for each token
    by_hand = 6 * blocks * LENGTH + attention + 6 * 96 * 32 * TARGETS
    assert operations(model()) == by_hand


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    model = llama()
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)

    attention = 12 * 3 * 32 * LENGTH * LENGTH
    whole = 4 * LLAMA_BLOCKS * LENGTH + attention + 4 * 96 * 32 * TARGETS
    assert operations(model) == whole + 2 * 3 * 32 * 80 * LENGTH
