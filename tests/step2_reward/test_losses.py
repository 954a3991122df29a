"""The losses of labels: neutral settings, probabilities, gradients, by hand and by enumeration."""

import math

import pytest
import torch
import torch.nn.functional as F

from step2_reward.losses import (
    binary_cross_entropy,
    cross_entropy,
    ordinal_log_probabilities,
    ordinal_loss,
    pairwise_loss,
    squared_error,
    tie_log_probabilities,
    tie_loss,
)

GENERATOR = torch.Generator().manual_seed(0)
CHOSEN, REJECTED = torch.randn(2, 50, generator=GENERATOR) * 3
LOGITS = torch.randn(50, 4, generator=GENERATOR)
CLASSES = torch.randint(0, 4, (50,), generator=GENERATOR)
NO_TIES = torch.zeros(50, dtype=torch.bool)


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def test_at_its_neutral_setting_each_loss_of_pairs_is_bradley_terry_to_the_bit() -> None:
    plain = pairwise_loss(CHOSEN, REJECTED)
    nothing = torch.zeros(50)
    neutral = {
        "margin 0": pairwise_loss(CHOSEN, REJECTED, margin=nothing),
        "focal gamma 0": pairwise_loss(CHOSEN, REJECTED, focal_gamma=0.0),
        "kappa 0": tie_loss(CHOSEN, REJECTED, NO_TIES, torch.tensor(0.0)),
        "2 ordered classes": ordinal_loss(
            CHOSEN, torch.ones(50, dtype=torch.int64), torch.zeros(1)
        ),
        "binary cross entropy": binary_cross_entropy(CHOSEN, torch.ones(50)),
    }
    against_0 = pairwise_loss(CHOSEN, nothing)

    for name, loss in neutral.items():
        expected = against_0 if name in ("2 ordered classes", "binary cross entropy") else plain
        assert torch.equal(loss, expected), name


def test_at_its_neutral_setting_each_loss_of_classes_is_cross_entropy_to_the_bit() -> None:
    plain = cross_entropy(LOGITS, CLASSES)

    assert plain.item() == pytest.approx(
        F.cross_entropy(LOGITS, CLASSES, reduction="sum").item(), rel=1e-6
    )
    assert torch.equal(cross_entropy(LOGITS, CLASSES, focal_gamma=0.0), plain)
    assert torch.equal(cross_entropy(LOGITS, CLASSES, weights=torch.ones(4)), plain)


def test_focal_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)]])  # p = 1/4, 3/4
    weights = torch.tensor([2.0, 1.0])

    easy = cross_entropy(logits, torch.tensor([1]), weights=weights, focal_gamma=2.0)
    hard = cross_entropy(logits, torch.tensor([0]), weights=weights, focal_gamma=2.0)

    assert easy.item() == pytest.approx(0.25**2 * math.log(4 / 3), rel=1e-6)
    assert hard.item() == pytest.approx(2 * 0.75**2 * math.log(4), rel=1e-6)
    pair = pairwise_loss(torch.tensor([math.log(3)]), torch.zeros(1), focal_gamma=2.0)
    assert pair.item() == pytest.approx(0.25**2 * math.log(4 / 3), rel=1e-6)


@pytest.mark.parametrize("kappa", [1e-4, 0.3, 2.0])
def test_a_win_a_tie_and_a_loss_have_probabilities_that_sum_to_1(kappa: float) -> None:
    difference = (CHOSEN - REJECTED).double()
    cut = torch.tensor(kappa, dtype=torch.float64)

    probabilities = tie_log_probabilities(difference, cut).exp()

    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(50).double())
    # Equal scores tie with probability tanh(kappa / 2).
    even = tie_log_probabilities(torch.zeros(1).double(), cut).exp()[0, 1]
    assert even.item() == pytest.approx(math.tanh(kappa / 2))


def test_the_loss_of_a_tie_is_its_log_probability_and_pulls_the_scores_together() -> None:
    chosen = torch.tensor([1.5], requires_grad=True)
    kappa = torch.tensor(0.4)

    loss = tie_loss(chosen, torch.zeros(1), torch.tensor([True]), kappa)
    loss.backward()

    expected = -math.log(math.expm1(0.8)) + softplus(-1.1) + softplus(1.9)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert chosen.grad is not None
    assert chosen.grad.item() > 0


def test_probabilities_of_ordered_classes_sum_to_1_and_are_differences_of_sigmoids() -> None:
    cutpoints = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    scores = CHOSEN.double()

    probabilities = ordinal_log_probabilities(scores, cutpoints).exp()

    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(50).double())
    at_most = torch.sigmoid(cutpoints - scores[:, None])
    ends = torch.zeros(50, 1).double(), torch.ones(50, 1).double()
    expected = torch.cat([at_most, ends[1]], dim=1) - torch.cat([ends[0], at_most], dim=1)
    torch.testing.assert_close(probabilities, expected)
    loss = ordinal_loss(scores, CLASSES, cutpoints)
    assert loss.item() == pytest.approx(
        -expected.gather(1, CLASSES[:, None]).log().sum().item(), rel=1e-6
    )


def test_losses_of_numbers_by_hand() -> None:
    assert squared_error(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 3.0])).item() == 0.5
    half = binary_cross_entropy(torch.tensor([2.0]), torch.tensor([0.5]))
    assert half.item() == pytest.approx(0.5 * softplus(-2) + 0.5 * softplus(2), rel=1e-6)
