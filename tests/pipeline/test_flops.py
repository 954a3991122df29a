"""Operations by formula, against those that PyTorch counts as they are run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from pipeline.run.utilization import model_flops
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
