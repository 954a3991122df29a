"""Class reward models in step 3: scores and the critic's head."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from pipeline.demo.model import build_tokenizer
from pipeline.models.forward.forward import base_model
from pipeline.models.hf.load import load_classifier
from pipeline.parallel.device import local_device
from step3_ppo.config import PPOConfig
from step3_ppo.models import Critic, load_critic, load_reward
from tests.step3_ppo.toy import toy_config

CPU = torch.device("cpu")
BATCH = collate([Encoded([1, 20, 21, 30, 2], [False] * 3 + [True] * 2)])


def class_reward_config(toy: Path, directory: Path, *, values: list[float] | None) -> PPOConfig:
    """Return settings with a reward model of three classes, as step 2 exports it."""
    config = toy_config(toy)
    model = load_classifier(config.reward, device=CPU, num_labels=3, seed=5)
    model.config.update({"class_values": values} if values else {})
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    path = str(directory)
    return replace(
        config, reward=replace(config.reward, path=path), critic=replace(config.critic, path=path)
    )


def test_class_score_is_the_expected_class_value(toy: Path, tmp_path: Path) -> None:
    config = class_reward_config(toy, tmp_path, values=[0.0, 1.0, 4.0])
    plain = load_classifier(config.reward, device=CPU)

    reward = load_reward(config, build_tokenizer())

    assert reward is not None
    with torch.no_grad():
        hidden = plain.base_model(BATCH.input_ids[None])[0][0, -1]
        expected = (plain.score(hidden).softmax(dim=0) * torch.tensor([0.0, 1.0, 4.0])).sum()
    score = reward.scores([BATCH.to(local_device())])[0].item()
    assert score == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_critic_from_a_class_model_has_a_new_scalar_head(
    toy: Path, tmp_path: Path, stage: int
) -> None:
    config = class_reward_config(toy, tmp_path, values=[0.0, 1.0, 4.0])
    config = replace(config, critic=replace(config.critic, zero_stage=stage))

    passes = load_critic(config, build_tokenizer(), total_steps=1)

    assert passes is not None
    critic = passes.engine.model
    assert isinstance(critic, Critic)
    assert base_model(critic.scorer.model).score.out_features == 1
    assert passes.engine(BATCH).isfinite().all()
