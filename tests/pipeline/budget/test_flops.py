"""Operations by formula, against those that PyTorch counts as they are run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from pipeline.budget.flops import ModelFlops, model_flops
from tests.families import tiny_config

LENGTH = 24


def counted(model: torch.nn.Module, *, backward: bool) -> int:
    """Operations of a pass over one sequence."""
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        logits = model(input_ids=ids, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "qwen3"])
def test_operations_are_those_that_pytorch_counts(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")
    flops = model_flops(model)

    # Rotary angles are a product of matrices too, of a thousandth of the operations here.
    assert LENGTH * flops.forward(LENGTH) == pytest.approx(counted(model, backward=False), rel=2e-3)
    assert LENGTH * flops.train(LENGTH) == pytest.approx(counted(model, backward=True), rel=2e-3)


def test_frozen_weights_have_no_gradient_and_recomputing_is_a_forward_pass() -> None:
    full = ModelFlops(weights=1000, trained=1000, layers=2, width=8)
    frozen = ModelFlops(weights=1000, trained=0, layers=2, width=8)

    assert full.forward(10) == 2000 + 640
    assert full.train(10) == 3 * full.forward(10)
    assert full.train(10, recomputes=True) == 4 * full.forward(10)
    assert frozen.train(10) == full.train(10) - 2000
