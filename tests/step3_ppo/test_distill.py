"""On-policy distillation: the gradient by hand, a student that approaches its teacher, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.serve.models import ModelPath
from pipeline.config import FrozenModelConfig
from pipeline.system.errors import ConfigError, ModelError
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Rollout, compute_advantages, score_responses
from step3_ppo.methods import METHODS
from step3_ppo.metrics import kl_statistics
from step3_ppo.models import Models
from step3_ppo.rollout import generate_responses
from step3_ppo.served_teacher import ServedTeacher
from tests.families import saved, tiny_causal_lm
from tests.inference.serve.serving import serving
from tests.pipeline.data.tokenizers import byte_level
from tests.step3_ppo.resumed import run_whole_and_resumed
from tests.step3_ppo.toy import PROMPTS, distance, gradients, toy_config, toy_models, updated


def taught(toy: Path, teacher: Path, **changes: Any) -> PPOConfig:
    """A teacher of another size than the actor's, with its tokenizer."""
    tokenizer = toy_models(toy_config(toy)).chat.tokenizer
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1}
    tokenizer.save_pretrained(saved(tiny_causal_lm("llama", seed=7, **sizes), teacher))
    given = {"method": "distill", "teacher": FrozenModelConfig(path=str(teacher))}
    return toy_config(toy, **{**METHODS["distill"], **given, **changes})


def sampled(models: Models, config: PPOConfig, *, seed: int = 0) -> Rollout:
    count = config.rollout_size
    prompts, keys = PROMPTS * (count // len(PROMPTS)), range(seed * count, (seed + 1) * count)
    responses = generate_responses(models, prompts, config, keys=keys)
    experience = score_responses(models, prompts, responses, config)
    return compute_advantages(experience, torch.zeros(count), config, kl_coef=1.0)


def test_the_gradient_is_that_of_each_tokens_log_ratio_and_none_later(
    toy: Path, tmp_path: Path
) -> None:
    config = taught(toy, tmp_path)
    models = toy_models(config)
    rollout = sampled(models, config)
    seen, mask = rollout.experience, rollout.experience.mask
    logprobs = models.actor(rollout.minibatch(range(len(PROMPTS))).tokens).logprobs
    advantages = (seen.ref_logprobs - seen.logprobs)[mask]
    parameters = dict(models.actor.model.named_parameters())
    loss = -(advantages * logprobs).sum() / len(logprobs)
    expected = torch.autograd.grad(loss, list(parameters.values()))

    updated(models, rollout, config)

    assert torch.equal(rollout.advantages[mask], advantages)
    torch.testing.assert_close(rollout.reward_score, rollout.advantages.sum(dim=1))
    found = torch.cat([gradients(models.actor)[name].flatten() for name in parameters])
    assert distance(found, torch.cat([each.flatten() for each in expected])) < 1e-4


@pytest.mark.jobs
def test_a_student_approaches_a_teacher_that_is_less_certain(toy: Path, tmp_path: Path) -> None:
    config = taught(toy, tmp_path, rollout_size=128, batch_size=128, micro_batch_size=64)
    config = replace(
        config, actor=replace(config.actor, optim=replace(config.actor.optim, lr=5e-3))
    )
    models, course = toy_models(config), list[float]()
    models.policy.model.norm.weight.data.mul_(0.3)
    models.policy.save_pretrained(tmp_path)
    models = toy_models(config)
    for seed in range(20):
        rollout = sampled(models, config, seed=seed)
        course.append(kl_statistics(rollout.experience)["kl"])
        updated(models, rollout, config, rows=range(128))

    assert 0 < sum(course[-3:]) < 0.7 * sum(course[:3]), course


def test_a_run_has_no_other_model_and_resumes_exactly(toy: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 2, "save_every": 1, "keep_best": False, "max_prompt_length": 40}
    config = taught(toy, tmp_path, **settings)
    config = replace(config, data=replace(config.data, max_eval_rows=4))
    runs = run_whole_and_resumed(config, tmp_path)

    whole, again = (tmp_path / name / "actor/model.safetensors" for name in ("whole", "again"))
    assert whole.read_bytes() == again.read_bytes()
    assert config.unused_roles == {"critic", "reward", "reference"}
    roles = [model.role for model in config.workload(1).models]
    assert roles == ["actor", "teacher", "base"]
    kept, resumed = ([each for each in lines if "reverse_kl" in each] for lines in runs)
    for line, other in zip(kept, resumed, strict=True):
        assert line["reverse_kl"] == other["reverse_kl"]
        assert line["score"] == pytest.approx(-line["reverse_kl"] * line["response_length"])
    figures = json.loads((tmp_path / "whole/result.json").read_text())["eval"]
    assert (figures["score_before"] < 0, figures["kl"], "kl" in line) == (True, None, False)


def test_a_served_teacher_gives_the_log_probabilities_of_a_local_one(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = taught(toy, tmp_path)
    rollout = sampled(toy_models(config), config)
    with serving((ModelPath("teacher", str(tmp_path)),), log_requests=False) as running:
        served = replace(config, teacher=FrozenModelConfig(), teacher_url=f"{running.url}/v1")
        models = toy_models(served)
        remote = sampled(models, served)
        assert (models.reference, served.unused_roles >= {"teacher"}) == (None, True)
        with pytest.raises(ModelError, match="has a different tokenizer from the actor's"):
            ServedTeacher(running.url, byte_level())

    found, expected = (each.experience.ref_logprobs for each in (remote, rollout))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert torch.equal(remote.experience.logprobs, rollout.experience.logprobs)
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    with pytest.raises(ConfigError, match="would send TEACHER_API_KEY unencrypted"):
        ServedTeacher("http://192.0.2.1:8000/v1", byte_level())
    with pytest.raises(ConfigError, match="temperature must be 1 with"):
        replace(served, temperature=0.7)


def test_what_can_not_teach_is_refused(toy: Path, tmp_path: Path) -> None:
    config = taught(toy, tmp_path)
    byte_level().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the actor and \S+ have different tokenizers"):
        toy_models(config)
    with pytest.raises(ConfigError, match="--method distill has no teacher: set --teacher"):
        replace(config, teacher=FrozenModelConfig())
    sources = (RewardConfig(name="right", kind="math"),)
    with pytest.raises(ConfigError, match="--method distill learns from its teacher alone: omit"):
        replace(config, rewards=sources)
    with pytest.raises(ConfigError, match="--teacher is for --method distill, not grpo"):
        replace(config, method="grpo", output_dir=Path("out/step3_ppo"))
