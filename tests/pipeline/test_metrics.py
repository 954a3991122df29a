"""Scalars of a step."""

import math

import torch

from pipeline.metrics import Averages


def test_averages_are_means_per_name() -> None:
    averages = Averages()
    averages.add({"loss": torch.tensor(1.0), "norm": torch.tensor(4.0)})
    averages.add({"loss": torch.tensor(3.0), "norm": torch.tensor(8.0)})

    assert averages.values() == {"loss": 2.0, "norm": 6.0}


def test_a_weight_counts_how_much_stands_behind_a_mean() -> None:
    averages = Averages()
    averages.add({"loss": torch.tensor(1.0)}, weight=30)
    averages.add({"loss": torch.tensor(5.0)}, weight=10)

    assert averages.values() == {"loss": 2.0}


def test_a_mean_over_nothing_does_not_spoil_the_others() -> None:
    averages = Averages()
    averages.add({"loss": torch.tensor(2.0)}, weight=4)
    averages.add({"loss": torch.tensor(float("nan"))}, weight=0)

    assert averages.values() == {"loss": 2.0}


def test_all_weights_0_give_nan() -> None:
    averages = Averages()
    averages.add({"loss": torch.tensor(2.0)}, weight=0)

    assert math.isnan(averages.values()["loss"])


def test_maxima_are_kept_beside_means_and_show_a_nan() -> None:
    averages = Averages()
    for ratio, gap in ((1.5, 0.0), (4.0, float("nan")), (2.0, 1.0)):
        averages.add({"loss": torch.tensor(1.0)})
        averages.add_maxima({"ratio_max": torch.tensor(ratio), "gap": torch.tensor(gap)})

    values = averages.values()

    assert values["loss"] == 1.0
    assert values["ratio_max"] == 4.0
    assert math.isnan(values["gap"])


def test_scalars_of_any_precision_and_shape_1_are_mixed_without_a_gradient() -> None:
    averages = Averages()
    averages.add({"loss": torch.tensor([2.0], requires_grad=True)})
    averages.add({"loss": torch.tensor(4.0, dtype=torch.bfloat16)})

    assert averages.values() == {"loss": 3.0}


def test_no_scalars_have_no_values() -> None:
    assert Averages().values() == {}
