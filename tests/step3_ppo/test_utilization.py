"""MFU of the updates in step 3: the passes that are made, by hand, and a share that is logged."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.parallel.mesh import current_mesh
from pipeline.run.utilization import ModelFlops, Peak, Utilization
from step3_ppo.metrics import UpdateUtilization
from step3_ppo.update import Update, Updates
from tests.step3_ppo.toy import toy_config, toy_models, toy_rollout

PEAK = Peak(1e6, "as set")
ACTOR = Utilization(ModelFlops(100, 100, 0, 0, head=40, head_learns=True), 0.0, PEAK)
CRITIC = Utilization(ModelFlops(50, 20, 0, 0), 1.0, PEAK)
"""Without attention: six operations for each weight, of frozen ones four; the output layer's for
the targets alone. The critic computes all blocks again."""


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

    actor = lengths * 6 * 60 + targets * 6 * 40
    critic, again = lengths * (4 * 50 + 2 * 20), lengths * 2 * 50
    fresh = replace(experience, forward=None)
    for updates, passes in ((4, 2.0), (3, 1.5)):
        got = used.metrics(fresh, made(updates), config, step=2, seconds=0.5)
        expected = passes * (actor + critic) / 1e6 / 0.5
        assert got["mfu_training"] == pytest.approx(expected, rel=1e-12)
        expected += passes * again / 1e6 / 0.5
        assert got["hfu_training"] == pytest.approx(expected, rel=1e-12)

    warming = used.metrics(fresh, made(4), config, step=1, seconds=0.5)
    assert warming["mfu_training"] == pytest.approx(2 * critic / 1e6 / 0.5, rel=1e-12)

    whole = replace(config, batch_size=8)
    experience = toy_rollout(models, whole).experience
    assert experience.forward is not None
    got = used.metrics(experience, made(2), whole, step=2, seconds=0.5)
    done = lengths * 2 * 60 + targets * 2 * 40 + lengths * 2 * 50
    assert got["mfu_training"] == pytest.approx((2 * (actor + critic) - done) / 5e5, rel=1e-12)
