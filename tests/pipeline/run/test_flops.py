"""Operations by formula, against those that PyTorch counts as they are run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from pipeline.parallel.mesh import current_mesh
from pipeline.run.utilization import utilization_of
from tests.families import tiny_config

LENGTH = 24


def counted(model: torch.nn.Module) -> int:
    """Operations of a forward and a backward pass over one sequence."""
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["opt", "gpt2", "llama", "qwen3"])
def test_operations_are_those_that_pytorch_counts(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")
    used = utilization_of(model, peak_tflops=1e-12, mesh=current_mesh())

    # Rotary angles are a product of matrices too, of a thousandth of the operations here.
    assert used.seconds([(LENGTH, LENGTH)]) == pytest.approx(counted(model), rel=2e-3)
