"""MFU of the updates in step 3: the passes that are made, by hand, and a share that is logged."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.parallel.mesh import current_mesh
from pipeline.run.utilization import Utilization
from step3_ppo.metrics import UpdateUtilization
from step3_ppo.update import Update, Updates
from tests.step3_ppo.toy import toy_config, toy_models, toy_rollout

ACTOR = Utilization(per_token=360.0, per_target=240.0, attention=0.0, peak=1e6)
CRITIC = Utilization(per_token=240.0, per_target=0.0, attention=0.0, peak=1e6)


def made(count: int) -> Updates:
    updates = Updates()
    for _ in range(count):
        updates.add(Update({}, 0, stopped=False))
    return updates


def test_both_passes_count_once_for_each_update_but_for_a_forward_pass_made_before(
    toy: Path,
) -> None:
    config = toy_config(toy, rollout_size=8, batch_size=4, ppo_epochs=2, critic_warmup_steps=1)
    models = toy_models(config)
    experience = toy_rollout(models, config).experience
    lengths = sum(map(len, experience.sequences))
    targets = sum(each.num_targets for each in experience.sequences)
    used = UpdateUtilization(ACTOR, CRITIC, current_mesh())

    actor, critic = lengths * 360 + targets * 240, lengths * 240
    fresh = replace(experience, forward=None)
    for updates, passes in ((4, 2.0), (3, 1.5)):
        got = used.metrics(fresh, made(updates), config, step=2, seconds=0.5)
        expected = passes * (actor + critic) / 1e6 / 0.5
        assert got["mfu_training"] == pytest.approx(expected, rel=1e-12)

    warming = used.metrics(fresh, made(4), config, step=1, seconds=0.5)
    assert warming["mfu_training"] == pytest.approx(2 * critic / 1e6 / 0.5, rel=1e-12)

    whole = replace(config, batch_size=8)
    experience = toy_rollout(models, whole).experience
    assert experience.forward is not None
    got = used.metrics(experience, made(2), whole, step=2, seconds=0.5)
    assert got["mfu_training"] == pytest.approx((2 - 1 / 3) * (actor + critic) / 5e5, rel=1e-12)
