"""The loss and figures of a micro-batch."""

import pytest
import torch

from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.models.passes import ForwardPasses
from step3_preference.config import PreferenceConfig
from step3_preference.objective import KTOInputs, objective
from step3_preference.rows import RowBatch


@pytest.mark.parametrize("good", [True, False])
def test_micro_batch_with_one_kind_of_response_has_loss_and_figures(*, good: bool) -> None:
    both = (0, 1)
    batch = RowBatch(
        tokens=collate([Encoded.untrained((1, 2, 3))]),
        counts=(2, 4),
        order=both,
        chosen=both if good else (),
        rejected=() if good else both,
    )
    logp, reference = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.0])
    config = PreferenceConfig(method="kto", loss="kto", beta=0.5)

    loss, figures = objective(batch, logp, reference, config, KTOInputs(0.0, 1.0, 1.0))

    # A response's loss is 1 - sigmoid(0.5 r) if good, else 1 - sigmoid(-0.5 r), with r = 1, -1.
    assert loss.item() == pytest.approx(1.0)
    means = figures.means(ForwardPasses(), 2, paired=False)
    side = "chosen" if good else "rejected"
    assert means[f"logp_{side}"] == pytest.approx((-1 / 2 - 3 / 4) / 2)
    assert means[f"reward_{side}"] == pytest.approx(0.0)
