"""Several reward models as one: the arithmetic by hand, the models, a run, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.batches import collate
from pipeline.data.examples import Encoded
from rewards.config import Pool, RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.reward_model import pooled
from tests.families import tiny_classifier
from tests.step3_ppo.resumed import run_whole_and_resumed
from tests.step3_ppo.toy import PROMPTS, save_models, toy_config, toy_models

THREE = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 3.0]])
"""Scores of two responses; the variances of the models are 2/3 and 2."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy models, and two more reward models with different means and scales."""
    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    for number, (mean, std) in enumerate([(-1.0, 0.5), (3.0, 4.0)], start=2):
        shutil.copytree(directory / "reward", directory / f"reward_{number}")
        vocabulary = json.loads((directory / "reward" / "config.json").read_text())["vocab_size"]
        other = tiny_classifier("llama", seed=number + 5, vocab_size=vocabulary, bos_token_id=1)
        other.config.update({"score_mean": mean, "score_std": std})
        other.save_pretrained(directory / f"reward_{number}")
    return directory


def source(directory: Path, **changes: Any) -> RewardConfig:
    members = tuple(str(directory / f"reward_{number}") for number in (2, 3))
    settings = {"name": "taste", "kind": "model", "members": members, **changes}
    return RewardConfig(**settings)


def pool_config(directory: Path, *, of: dict[str, Any] | None = None, **changes: Any) -> PPOConfig:
    return toy_config(directory, rewards=(source(directory, **(of or {})),), **changes)


@pytest.mark.parametrize(
    ("pool", "pool_lambda", "scores"),
    [
        ("mean", 0.0, [2.0, 1.0]),
        ("uwo", 0.0, [2.0, 1.0]),
        ("uwo", 0.5, [2.0 - 1 / 3, 0.0]),
        ("uwo", 3.0, [0.0, -5.0]),
        ("min", 0.0, [1.0, 0.0]),
    ],
)
def test_scores_are_pooled_as_in_the_paper(
    pool: Pool, pool_lambda: float, scores: list[float]
) -> None:
    assert pooled(THREE, pool, pool_lambda).tolist() == pytest.approx(scores)
    alone = pooled(THREE[:1], pool, pool_lambda)
    assert torch.equal(alone, THREE[0])  # one model agrees with itself


@pytest.mark.parametrize("pool", ["mean", "uwo", "min"])
def test_a_pool_scores_as_its_members_do_each_in_its_own_unit(directory: Path, pool: Pool) -> None:
    of = {"pool": pool} | ({"pool_lambda": 0.7} if pool == "uwo" else {})
    batch = collate([Encoded.untrained(prompt) for prompt in PROMPTS])

    together = toy_models(pool_config(directory, of=of)).reward

    each = []
    for name in ("reward", "reward_2", "reward_3"):
        path = RewardConfig(name="alone", kind="model", path=str(directory / name))
        alone = toy_models(toy_config(directory, rewards=(path,))).reward
        each.append(alone.normalized(alone.scores([batch])[0]))
    expected = pooled(torch.stack(each), pool, 0.7)
    scores = together.scores([batch])[0]
    assert torch.equal(scores, expected)
    assert torch.equal(together.normalized(scores), scores)
    assert each[0].tolist() != pytest.approx(each[1].tolist(), abs=0.01)


@pytest.mark.jobs
def test_a_run_is_rewarded_by_the_pool_also_after_a_resume(directory: Path, tmp_path: Path) -> None:
    config = pool_config(
        directory, of={"pool": "min"}, max_steps=2, save_every=1, max_prompt_length=40
    )
    config = replace(config, data=replace(config.data, max_eval_rows=4))

    first, second = run_whole_and_resumed(config, tmp_path)

    scores = [line["reward_taste"] for line in first if "reward_taste" in line]
    assert len(scores) == 2
    assert scores == [line["reward_taste"] for line in second if "reward_taste" in line]
