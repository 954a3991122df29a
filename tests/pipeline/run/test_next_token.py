"""The next-token loss is a sum."""

import torch

from pipeline.run.next_token import next_token_nll


def test_the_loss_is_the_summed_negative_log_likelihood() -> None:
    assert next_token_nll(torch.tensor([-1.0, -2.5, -0.5])).item() == 4.0
    assert next_token_nll(torch.empty(0)).item() == 0.0
