"""Distillation: the gradients by hand, a student that approaches its teacher, refusals."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inference.serve.models import ModelPath
from pipeline.config import FrozenModelConfig
from pipeline.models.forward.forward import LARGE_VOCABULARY, Policy
from pipeline.models.hf.load import load_causal_lm
from pipeline.system.errors import ConfigError, ModelError
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.divergence import Output, generalized_jsd, gkd_loss
from step3_ppo.experience import Rollout, compute_advantages, score_responses
from step3_ppo.methods import METHODS
from step3_ppo.metrics import kl_statistics
from step3_ppo.models import Models
from step3_ppo.rollout import generate_responses
from step3_ppo.served_teacher import ServedTeacher
from tests.inference.serve.serving import serving
from tests.pipeline.data.tokenizers import byte_level
from tests.step3_ppo.resumed import run_whole_and_resumed
from tests.step3_ppo.toy import (
    PROMPTS,
    distance,
    gradients,
    save_models,
    toy_config,
    toy_models,
    updated,
)


def taught(toy: Path, method: str = "distill", **changes: Any) -> PPOConfig:
    given = {"method": method, "teacher": FrozenModelConfig(path=str(toy / "teacher"))}
    return toy_config(toy, **{**METHODS[method], **given, **changes})


def sampled(models: Models, config: PPOConfig, *, seed: int = 0) -> Rollout:
    count = config.rollout_size
    prompts, keys = PROMPTS * (count // len(PROMPTS)), range(seed * count, (seed + 1) * count)
    responses = generate_responses(models, prompts, config, keys=keys)
    experience = score_responses(models, prompts, responses, config)
    return compute_advantages(experience, torch.zeros(count), config, kl_coef=1.0)


def test_the_gradient_is_that_of_each_tokens_log_ratio_and_none_later(toy: Path) -> None:
    config = taught(toy)
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


@pytest.mark.parametrize(("beta", "size"), [(0.0, 6), (0.1, 9), (1.0, 6)])
def test_the_divergence_in_tiles_has_the_gradients_of_whole_logits(beta: float, size: int) -> None:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    inputs = hidden, matrix, bias = [draw(n).requires_grad_() for n in ((5, 4), (size, 4), (size,))]
    teacher, targets, weights = draw(5, 8), torch.tensor([0, 5, 2, 2, 1]), torch.rand(5)
    logits = F.linear(hidden, matrix, bias) / 0.7
    own = logits[:, :8].softmax(dim=1)  # the last ids of the larger model are padding
    other = (teacher[:, :size] / 0.7).softmax(dim=1)
    mixture = beta * other + (1 - beta) * own
    forward, reverse = other * (other / mixture).log(), own * (own / mixture).log()
    terms = {0: forward, 1: reverse}.get(beta, beta * forward + (1 - beta) * reverse)
    expected = (terms.sum(dim=1) * weights).sum()

    settings = {"beta": beta, "temperature": 0.7, "tile": 12}
    loss, *figures = gkd_loss(Output(*inputs), Output(teacher), targets, weights, **settings)

    kl = (own * (own / other).log()).sum(dim=1)
    logprobs = logits.log_softmax(dim=1)[range(5), targets]
    torch.testing.assert_close([loss, *figures], [expected, logprobs, kl])
    found, wanted = (torch.autograd.grad(3 * each, inputs) for each in (loss, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("stage", [0, 3])
def test_gkd_learns_from_all_logits_of_a_large_vocabulary(tmp_path: Path, stage: int) -> None:
    save_models(tmp_path, vocab_size=LARGE_VOCABULARY)
    config = taught(tmp_path, "gkd", group_size=2, micro_batch_size=4)
    config = replace(config, actor=replace(config.actor, zero_stage=stage))
    models = toy_models(config)
    rollout = sampled(models, config)
    batch, device = rollout.minibatch(range(len(PROMPTS))).tokens, torch.device("cpu")
    sources = config.actor, config.teacher
    both = [Policy(load_causal_lm(each, device=device, seed=0)) for each in sources]
    own, other = (policy.logits(batch) for policy in both)
    losses, of_logits = generalized_jsd(own.log_softmax(1), other.log_softmax(1), beta=0.5)
    own.backward(of_logits / len(of_logits))

    update = updated(models, rollout, config)

    assert update.metrics["policy_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert update.metrics["ratio_error"] < 1e-4
    found, plain = gradients(models.actor), dict(both[0].named_parameters())
    wanted = torch.cat([plain[name].grad.flatten() for name in found])
    assert distance(torch.cat([each.flatten() for each in found.values()]), wanted) < 1e-4


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("method", "size", "rounds", "lr"), [("distill", 128, 20, 0.005), ("gkd", 64, 10, 0.01)]
)
def test_a_student_approaches_a_less_certain_teacher(
    toy: Path, tmp_path: Path, method: str, size: int, rounds: int, lr: float
) -> None:
    config = taught(toy, method, rollout_size=size, batch_size=size, micro_batch_size=64)
    optim = replace(config.actor.optim, lr=lr)
    config = replace(config, actor=replace(config.actor, optim=optim))
    models, course = toy_models(config), list[float]()
    models.policy.model.norm.weight.data.mul_(0.3)
    models.policy.save_pretrained(tmp_path)
    models.chat.tokenizer.save_pretrained(tmp_path)
    models = toy_models(replace(config, teacher=FrozenModelConfig(path=str(tmp_path))))
    for seed in range(rounds):
        rollout = sampled(models, config, seed=seed)
        course.append(kl_statistics(rollout.experience)["kl"])
        updated(models, rollout, config, rows=range(size))

    assert 0 < sum(course[-3:]) < 0.7 * sum(course[:3]), course


@pytest.mark.parametrize("method", ["distill", "gkd"])
def test_a_run_has_no_other_model_and_resumes(toy: Path, tmp_path: Path, method: str) -> None:
    settings = {"max_steps": 2, "save_every": 1, "keep_best": False, "max_prompt_length": 40}
    config = taught(toy, method, **settings)
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
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = taught(toy)
    rollout = sampled(toy_models(config), config)
    with serving((ModelPath("teacher", str(toy / "teacher")),), log_requests=False) as running:
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
    config = taught(toy)
    byte_level().save_pretrained(shutil.copytree(toy / "teacher", tmp_path / "teacher"))
    with pytest.raises(ModelError, match=r"the actor and \S+ have different tokenizers"):
        toy_models(replace(config, teacher=FrozenModelConfig(path=str(tmp_path / "teacher"))))
    with pytest.raises(ConfigError, match="--method distill has no teacher: set --teacher"):
        replace(config, teacher=FrozenModelConfig())
    sources = (RewardConfig(name="right", kind="math"),)
    with pytest.raises(ConfigError, match="--method distill learns from its teacher alone: omit"):
        replace(config, rewards=sources)
    with pytest.raises(ConfigError, match="--teacher is for --method distill or gkd, not grpo"):
        replace(config, method="grpo", output_dir=Path("out/step3_ppo"))
    full = taught(toy, "gkd")
    with pytest.raises(ConfigError, match="gkd compares all logits, which servers don't return"):
        replace(full, teacher=FrozenModelConfig(), teacher_url="http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="--method gkd learns from its teacher alone"):
        replace(full, entropy_coef=0.1)
