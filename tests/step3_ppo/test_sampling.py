"""Prompts of a rollout, and the replacement of dead groups."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evaluation.held_out import Prompt
from pipeline.config import TrainedModelConfig
from pipeline.data.batches import RowStream
from pipeline.data.sharing.prompts import PromptRecord
from rewards.config import RewardConfig
from rewards.contract import SourceResults
from step3_ppo.config import PPOConfig
from step3_ppo.methods import METHODS
from step3_ppo.rewards import compute_raw_scores
from step3_ppo.rollout import PromptBatch, Prompts, SampledRollout, find_dead_groups, sample_rollout
from tests.distributed import rank, run_ranks
from tests.step3_ppo.resumed import run_full_and_resumed
from tests.step3_ppo.toy import FEW, PROMPTS, toy_config, toy_models

GRPO = METHODS["grpo"] | {"group_size": 2, "overlong": "score", "drop_solved": 1.0}


def make_prompts(num_rows: int = 20) -> Prompts:
    """Return prompts for rollouts of four groups of two; the prompt of row r is the token r."""
    return Prompts(
        train=[Prompt((), [row]) for row in range(num_rows)],
        held_out=[],
        stream=RowStream(num_rows=num_rows, batch_size=4, seed=0),
        fingerprint="",
        group_size=2,
        record=PromptRecord.__new__(PromptRecord),
    )


def prompts_by_key(*batches: PromptBatch) -> dict[int, list[int]]:
    """Return the prompts by key; no key occurs twice."""
    pairs = [pair for batch in batches for pair in zip(batch.keys, batch.inputs, strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_refills_take_the_next_prompts_with_new_keys() -> None:
    prompts = make_prompts()
    order = RowStream(num_rows=20, batch_size=10, seed=0).next_rows(10)

    first, refill, second = prompts.next_batch(), prompts.next_batch([1, 3]), prompts.next_batch()

    assert refill.groups == [1, 3]
    assert [row for (row,) in first.inputs[::2] + refill.inputs[::2] + second.inputs[::2]] == order
    assert list(prompts_by_key(first, refill, second)) == list(range(20))
    assert prompts.stream.state_dict() == {"position": 10, "dropped": []}
    keys = replace(make_prompts(), group_size=3, attempt=1).next_batch().keys
    assert len({key // 3 for key in keys}) == 4  # each group's episodes have one seed


def read_local_prompts() -> tuple[dict[int, list[int]], list[int], list[int]]:
    """Return this process's prompts by key and refilled groups, and the dead groups of all."""
    prompts = make_prompts()
    first, refill = prompts.next_batch(), prompts.next_batch([0, 1, 2])
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0]) if rank() == 0 else torch.tensor([0.0, 1, 2, 2])
    config = PPOConfig(rewards=(RewardConfig(name="a", kind="math"),), drop_solved=1.0)
    prompts.drop_solved(first, {"a": SourceResults(rewards.tolist(), [None] * 4)}, config)
    order = make_prompts().stream.next_rows(4)
    assert prompts.stream.dropped == {order[0], order[3]}
    dead = find_dead_groups(rewards, torch.ones(4).bool(), group_size=2)
    return prompts_by_key(first, refill), refill.groups, dead


def sample(toy: Path, rounds: int) -> tuple[SampledRollout, list[int], int]:
    """Sample four prompts with two responses each, whose scores are clipped to signs.

    Also returns the groups with equal rewards, and the number of consumed prompts.
    """
    signs = {"normalize_score": False, "score_clip": 1e-3, "missing_eos_score": None, "seed": 3}
    config = toy_config(toy, advantage="grpo", group_size=2, dynamic_sampling=rounds, **signs)
    models, prompts = toy_models(config), make_prompts()
    for row, prompt in enumerate(prompts.train):
        prompt.input_ids[:] = [*PROMPTS[row % len(PROMPTS)], 30 + row]
    rollout = sample_rollout(models, prompts, config)
    score = compute_raw_scores(models, rollout.inputs, rollout.responses, config)
    dead = find_dead_groups(score.sign(), torch.ones(8).bool(), group_size=2)
    return rollout, dead, prompts.stream.position


def test_groups_with_equal_rewards_are_replaced(toy: Path) -> None:
    plain, dead, num_plain = sample(toy, 0)
    refilled, remaining_once, num_refilled = sample(toy, 1)
    _, remaining, _ = sample(toy, 20)

    assert 0 < len(dead) < 4
    assert (num_plain, num_refilled) == (4, 4 + len(dead))
    assert refilled.metrics == {"refills": len(dead)}
    assert set(remaining_once) <= set(dead)
    assert remaining == []
    for group in range(4):
        rows = slice(2 * group, 2 * group + 2)
        replaced = refilled.inputs[rows] != plain.inputs[rows]
        assert replaced == (refilled.responses[rows] != plain.responses[rows]) == (group in dead)


def test_two_processes_share_the_prompts_of_one() -> None:
    prompts = make_prompts()
    expected = prompts_by_key(prompts.next_batch(), prompts.next_batch([0, 1, 2]))

    (first, first_groups, dead), (second, second_groups, other_dead) = run_ranks(read_local_prompts)

    assert first | second == expected
    assert not first.keys() & second.keys()
    assert (first_groups, second_groups) == ([0, 2], [1])
    # The first process has groups 0 and 2, the second 1 and 3.
    assert dead == other_dead == [0, 3]


@pytest.mark.jobs
def test_solved_prompts_are_dropped_also_after_a_resume(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(Path(*FEW.path).read_text().split("\n")[:22]))
    config = toy_config(
        toy,
        **(GRPO | {"dynamic_sampling": 1, "max_steps": 20, "save_every": 1, "keep_best": False}),
        rewards=(
            RewardConfig(name="solved", kind="regex", pattern="."),
            RewardConfig(name="varied", kind="regex", pattern="e", weight=-0.5),
        ),
        data=replace(FEW, path=(str(tmp_path / "rows.jsonl"),), max_eval_rows=2),
        critic=TrainedModelConfig(path=str(tmp_path / "nowhere")),
        max_prompt_length=40,
    )
    (tmp_path / "full/critic").mkdir(parents=True)  # from an earlier run
    runs = run_full_and_resumed(config, tmp_path)

    lines, others = ([line for line in lines if "solved_prompts" in line] for lines in runs)
    counts = [line["solved_prompts"] for line in lines]
    assert counts == [line["solved_prompts"] for line in others]
    assert (len(counts), counts[0] < counts[1] == 9) == (2, True)
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    weights = "actor/model.safetensors"
    assert (full / weights).read_bytes() == (resumed / weights).read_bytes()
    assert not {"value_loss", "explained_variance"} & set(lines[-1])
    assert not (full / "critic").exists()


def test_prompt_is_solved_if_all_its_rewards_are_maximal(toy: Path) -> None:
    length = RewardConfig(name="short", kind="length", max_tokens=4)
    sources = (RewardConfig(name="right", kind="math"), length)
    config = toy_config(toy, **GRPO, rewards=sources)
    prompts = make_prompts()
    batch, failed = prompts.next_batch(), [None] * 7 + ["it failed"]
    right = SourceResults([1.0, 1.0, 0.9, 1.0, None, 0.0, 1.0, 1.0], failed)
    short = SourceResults([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -0.1, 0.0], [None] * 8)

    prompts.drop_solved(batch, {"right": right, "short": short}, replace(config, drop_solved=0.5))

    assert prompts.stream.dropped == set(batch.rows[:3])
    assert set(prompts.stream.next_rows(16 + 17)) == {*range(20)} - {*batch.rows[:3]}
