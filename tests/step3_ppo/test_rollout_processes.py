"""Rollouts that separate processes sample one iteration ahead."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inference.remote import Message
from pipeline.budget.fit import find_shortage
from pipeline.budget.machine import Machine
from pipeline.budget.memory import memory_summary, step_memory
from pipeline.config import DataConfig, LoraConfig
from pipeline.models.hf.chat import load_chat
from pipeline.parallel.mesh import split_mesh
from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.experience import compute_advantages, score_responses
from step3_ppo.methods import METHODS
from step3_ppo.models import load_models
from step3_ppo.rewards import compute_rewards
from step3_ppo.rollout import generate_responses, load_prompts
from step3_ppo.train import train
from step3_ppo.update import update_policy
from tests.distributed import run_ranks
from tests.jobs import run_job
from tests.step3_ppo.test_every_method import load_actor
from tests.step3_ppo.toy import save_models, toy_config

GRPO = {
    **METHODS["grpo"],
    "method": "grpo",
    "group_size": 2,
    "overlong": "score",
    "rewards": (RewardConfig(name="short", kind="length", max_tokens=3),),
}


def make_config(directory: Path, **changes: Any) -> PPOConfig:
    """Return settings of three iterations, each saved; the last weights are exported."""
    actor = replace(toy_config(directory).actor, **changes.pop("actor", {}))
    defaults = {"data": DataConfig(max_length=56, max_eval_rows=4), "max_prompt_length": 48}
    defaults |= {"max_steps": 3, "save_every": 1, "keep_last": 9, "keep_best": False}
    defaults |= {"rollout_processes": 1, "correction": "auto", "actor": actor}
    return toy_config(directory, **{**defaults, **changes})


def run(config: PPOConfig) -> None:
    with split_mesh(replicas=1, generating=config.rollout_processes, timeout_seconds=60.0):
        train(config)


def read_iterations(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "score" in line]


def train_by_hand(config: PPOConfig) -> dict[str, Tensor]:
    """Sample each rollout before the previous one's update; return the final weights."""
    chat = load_chat(config.actor, config.data)
    prompts, models = load_prompts(chat, config), load_models(config, chat, iterations=3)
    batch = prompts.next_batch()
    responses = generate_responses(models, batch.inputs, config, keys=batch.keys)
    for step in (1, 2, 3):
        following = prompts.next_batch()
        ahead = generate_responses(models, following.inputs, config, keys=following.keys)
        experience = score_responses(models, batch.inputs, responses, config, step=step)
        rewards = compute_rewards(models, experience.score, experience.stopped, config)
        rollout = compute_advantages(experience, rewards.reward, config, kl_coef=config.kl_coef)
        weights = (experience.logprobs - experience.sampled_logprobs).exp().clamp(max=2.0)
        assert rollout.correction is not None
        torch.testing.assert_close(rollout.correction[experience.mask], weights[experience.mask])
        update_policy(models, rollout, config, step=step, forward=experience.forward)
        batch, responses = following, ahead
    return {name: param.detach() for name, param in models.policy.named_parameters()}


def test_each_rollout_is_sampled_before_the_previous_update(tmp_path: Path) -> None:
    save_models(tmp_path)
    rloo = {"advantage": "rloo", "group_size": 2, "normalize_score": False}
    config = make_config(tmp_path, **rloo, output_dir=tmp_path / "out")

    run_ranks(run, config)

    (expected,) = run_ranks(train_by_hand, config, world_size=1)
    actual = load_actor(config.output_dir)
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    lines = read_iterations(config.output_dir)
    assert [line["staleness"] for line in lines] == [0, 1, 1]
    assert [line["seconds_weight_sync"] > 0 for line in lines] == [True, True, False]
    assert lines[0]["weights_hash"] == lines[1]["weights_hash"] != lines[2]["weights_hash"]


@pytest.mark.jobs
def test_resumed_run_matches_uninterrupted_one_bitwise(tmp_path: Path) -> None:
    save_models(tmp_path, tie_word_embeddings=True)
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    actor = {"zero_stage": 3, "lora": LoraConfig(rank=2, lr=0.01, targets=("lm_head", "q_proj"))}
    config = make_config(tmp_path, **GRPO, actor=actor)
    run_ranks(run, replace(config, output_dir=full), world_size=3)
    shutil.copytree(full, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_00000003")
    (resumed / "result.json").unlink()

    run_ranks(run, replace(config, output_dir=resumed, resume=True), world_size=3)

    expected, actual = load_actor(full), load_actor(resumed)
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    last, resumed_last = read_iterations(full)[-1], read_iterations(resumed)[-1]
    for name in ("score", "rollout_gap", "weights_hash", "staleness", "correction"):
        assert resumed_last[name] == last[name]
    two = replace(config, output_dir=tmp_path / "two", rollout_processes=2)
    run_ranks(run, two, world_size=4)
    assert read_iterations(two.output_dir)[-1]["score"] == pytest.approx(last["score"], rel=1e-3)


def train_with_fault(config: PPOConfig, fault: str) -> None:
    """Train; the generating process is killed or hangs, or all receive a signal to stop."""
    is_signal = fault.startswith("SIG")
    if is_signal:
        args = (config, signal.Signals[fault])
        threading.Thread(target=stop_after_a_step, args=args, daemon=True).start()
    if is_signal or os.environ["RANK"] == "0":
        run(config)
        return
    with split_mesh(replicas=1, generating=1, timeout_seconds=3.0) as mesh:
        assert mesh.rollout is not None
        mesh.rollout.job.gather_objects(Message())
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def stop_after_a_step(config: PPOConfig, number: signal.Signals) -> None:
    while not (config.output_dir / "checkpoints" / "step_00000001").exists():
        time.sleep(0.05)
    os.kill(os.getpid(), number)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "codes", "message"),
    [
        ("kill", [1, -9], "rank 1 was lost"),
        ("hang", [1, 1], "rank 1 hangs: rank 0 waited"),
        ("SIGTERM", [75, 75], ""),
        ("SIGINT", [130, 130], ""),
    ],
)
def test_fault_of_a_generating_process_ends_the_job(
    fault: str, codes: list[int], message: str, tmp_path: Path
) -> None:
    save_models(tmp_path)
    config = make_config(tmp_path, max_steps=200, output_dir=tmp_path / "out")

    job = run_job(train_with_fault, config, fault, timeout_seconds=3.0)

    assert job.codes == codes, job.errors
    assert message in job.errors


def test_memory_of_generating_processes_is_planned(tmp_path: Path) -> None:
    save_models(tmp_path)
    config = make_config(tmp_path)
    machine = Machine(2, 2, None, 2**34, "it")
    memory = step_memory(config, machine=machine)

    rollouts = memory.phases[-1]
    assert rollouts.name == "rollouts"
    assert set(rollouts.bytes_by_kind("device")) >= {"weights", "kv_cache", "runtime"}
    assert "only generate" in memory_summary(memory, machine)
    (train_phase,) = (phase for phase in memory.phases if phase.name == "train")
    total = sum(phase.at_minimum().peak("device") for phase in (train_phase, rollouts))
    assert find_shortage(memory, replace(machine, host_bytes=total)) is None
    assert find_shortage(memory, replace(machine, host_bytes=total - 1)) is not None
    with pytest.raises(ConfigError, match="rollout_processes 1 leaves none of the 1 process to"):
        config.check_processes(1)
