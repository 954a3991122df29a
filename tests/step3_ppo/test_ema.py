"""The moving average of the actor's weights."""

import pytest
import torch
from torch import nn

from step3_ppo.ema import Ema


def test_the_average_moves_by_one_minus_decay_of_the_way() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    ema = Ema(model, decay=0.75)
    averages = []

    for value in (2.0, 2.0, -1.0):
        nn.init.constant_(model.weight, value)
        ema.update()
        averages.append(ema.shadow["weight"].item())

    # 1 + 0.25, then 1.25 + 0.25 * 0.75, then 1.4375 - 0.25 * 2.4375
    assert averages == [1.25, 1.4375, 0.828125]


def test_the_models_own_weights_come_back_to_the_bit_also_after_an_error() -> None:
    model = nn.Linear(3, 2).bfloat16()
    ema = Ema(model, decay=0.5)
    with torch.no_grad():
        model.weight.add_(1 / 3)
    ema.update()
    own = {name: param.clone() for name, param in model.named_parameters()}

    def interrupted() -> None:
        with ema.applied():
            assert torch.equal(model.weight, ema.shadow["weight"].bfloat16())
            assert not torch.equal(model.weight, own["weight"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert all(torch.equal(param, own[name]) for name, param in model.named_parameters())


def test_the_average_of_bf16_weights_is_kept_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.constant_(model.weight, 1.0)
    ema = Ema(model, decay=0.999)
    nn.init.constant_(model.weight, 2.0)

    ema.update()

    assert ema.shadow["weight"].item() == pytest.approx(1.001)


def test_frozen_weights_are_not_averaged() -> None:
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)

    assert set(Ema(model, decay=0.9).shadow) == {"weight"}
