"""Distillation: gradients, convergence to the teacher, and invalid settings."""

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
from pipeline.config import DataConfig, FrozenModelConfig
from pipeline.data.batches import collate
from pipeline.data.sharing.steps import load_step_rows
from pipeline.models.forward.forward import LARGE_VOCABULARY, Policy
from pipeline.models.hf.chat import load_chat
from pipeline.models.hf.load import load_causal_lm
from pipeline.system.errors import ConfigError, DataError, ModelError
from rewards.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.divergence import Logits, generalized_jsd, gkd_loss
from step3_ppo.experience import Rollout, compute_advantages, score_responses
from step3_ppo.methods import METHODS
from step3_ppo.metrics import kl_statistics
from step3_ppo.models import Models
from step3_ppo.rollout import generate_responses, load_prompts, sample_rollout
from step3_ppo.served_teacher import ServedTeacher
from tests.inference.serve.serving import serving
from tests.pipeline.data.tokenizers import byte_level
from tests.step3_ppo.resumed import run_full_and_resumed
from tests.step3_ppo.toy import (
    END,
    PROMPTS,
    read_gradients,
    relative_error,
    run_update,
    save_models,
    toy_config,
    toy_models,
)


def distill_config(toy: Path, method: str = "distill", **changes: Any) -> PPOConfig:
    teacher = {"method": method, "teacher": FrozenModelConfig(path=str(toy / "teacher"))}
    return toy_config(toy, **{**METHODS[method], **teacher, **changes})


def sample_on_policy(models: Models, config: PPOConfig, *, seed: int = 0) -> Rollout:
    count = config.rollout_size
    prompts, keys = PROMPTS * (count // len(PROMPTS)), range(seed * count, (seed + 1) * count)
    responses = generate_responses(models, prompts, config, keys=keys)
    experience = score_responses(models, prompts, responses, config)
    return compute_advantages(experience, torch.zeros(count), config, kl_coef=1.0)


def test_gradient_uses_each_tokens_log_ratio_as_advantage(toy: Path) -> None:
    config = distill_config(toy)
    models = toy_models(config)
    rollout = sample_on_policy(models, config)
    experience, mask = rollout.experience, rollout.experience.mask
    logprobs = models.actor(rollout.micro_batch(range(len(PROMPTS))).tokens).logprobs
    advantages = (experience.ref_logprobs - experience.logprobs)[mask]
    parameters = dict(models.actor.model.named_parameters())
    loss = -(advantages * logprobs).sum() / len(logprobs)
    expected = torch.autograd.grad(loss, list(parameters.values()))

    run_update(models, rollout, config)

    assert torch.equal(rollout.advantages[mask], advantages)
    torch.testing.assert_close(rollout.reward_score, rollout.advantages.sum(dim=1))
    actual = torch.cat([read_gradients(models.actor)[name].flatten() for name in parameters])
    assert relative_error(actual, torch.cat([grad.flatten() for grad in expected])) < 1e-4


@pytest.mark.parametrize(("beta", "size"), [(0.0, 6), (0.1, 9), (1.0, 6)])
def test_tiled_divergence_matches_full_logits(beta: float, size: int) -> None:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    inputs = hidden, matrix, bias = [draw(n).requires_grad_() for n in ((5, 4), (size, 4), (size,))]
    teacher, targets, weights = draw(5, 8), torch.tensor([0, 5, 2, 2, 1]), torch.rand(5)
    logits = F.linear(hidden, matrix, bias) / 0.7
    p = logits[:, :8].softmax(dim=1)  # the larger model's last ids are padding
    q = (teacher[:, :size] / 0.7).softmax(dim=1)
    mixture = beta * q + (1 - beta) * p
    forward, reverse = q * (q / mixture).log(), p * (p / mixture).log()
    terms = {0: forward, 1: reverse}.get(beta, beta * forward + (1 - beta) * reverse)
    expected = (terms.sum(dim=1) * weights).sum()

    settings = {"beta": beta, "temperature": 0.7, "tile": 12}
    loss, *figures = gkd_loss(Logits(*inputs), Logits(teacher), targets, weights, **settings)

    kl = (p * (p / q).log()).sum(dim=1)
    logprobs = logits.log_softmax(dim=1)[range(5), targets]
    torch.testing.assert_close([loss, *figures], [expected, logprobs, kl])
    actual, grads = (torch.autograd.grad(3 * value, inputs) for value in (loss, expected))
    torch.testing.assert_close(actual, grads)


def test_divergence_uses_exact_logits_of_fp32_hidden_states() -> None:
    hidden, matrix = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, targets = torch.ones(9), torch.arange(9)
    logits = (hidden.double() @ matrix.double().T).float()
    settings = {"beta": 0.5, "temperature": 0.7, "tile": 30}
    layer, full, teacher = Logits(hidden.float(), matrix, None), Logits(logits), Logits(-logits)

    actual = gkd_loss(layer, teacher, targets, weights, **settings)

    expected = gkd_loss(full, teacher, targets, weights, **settings)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_gkd_gradient_matches_full_logits_of_a_large_vocabulary(tmp_path: Path, stage: int) -> None:
    save_models(tmp_path, vocab_size=LARGE_VOCABULARY)
    config = distill_config(tmp_path, "gkd", group_size=2, micro_batch_size=4)
    config = replace(config, actor=replace(config.actor, zero_stage=stage))
    models = toy_models(config)
    rollout = sample_on_policy(models, config)
    batch, device = rollout.micro_batch(range(len(PROMPTS))).tokens, torch.device("cpu")
    sources = config.actor, config.teacher
    policies = [Policy(load_causal_lm(source, device=device, seed=0)) for source in sources]
    student, teacher = (policy.logits(batch) for policy in policies)
    losses, logits_grad = generalized_jsd(student.log_softmax(1), teacher.log_softmax(1), beta=0.5)
    student.backward(logits_grad / len(logits_grad))

    update = run_update(models, rollout, config)

    assert update.metrics["policy_loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert update.metrics["ratio_error"] < 1e-4
    actual, plain = read_gradients(models.actor), dict(policies[0].named_parameters())
    expected = torch.cat([plain[name].grad.flatten() for name in actual])
    assert relative_error(torch.cat([grad.flatten() for grad in actual.values()]), expected) < 1e-4


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("method", "size", "rounds", "lr"), [("distill", 128, 10, 0.02), ("gkd", 64, 10, 0.01)]
)
def test_student_approaches_its_teacher(
    toy: Path, tmp_path: Path, method: str, size: int, rounds: int, lr: float
) -> None:
    config = distill_config(toy, method, rollout_size=size, batch_size=size, micro_batch_size=64)
    optim = replace(config.actor.optim, lr=lr)
    config = replace(config, actor=replace(config.actor, optim=optim))
    models, kls = toy_models(config), list[float]()
    models.policy.model.norm.weight.data.mul_(0.3)
    models.policy.save_pretrained(tmp_path)
    models.chat.tokenizer.save_pretrained(tmp_path)
    models = toy_models(replace(config, teacher=FrozenModelConfig(path=str(tmp_path))))
    for seed in range(rounds):
        rollout = sample_on_policy(models, config, seed=seed)
        kls.append(kl_statistics(rollout.experience)["kl"])
        run_update(models, rollout, config, rows=range(size))

    assert 0 < sum(kls[-3:]) < 0.7 * sum(kls[:3]), kls


def test_demonstrations_replace_samples(toy: Path) -> None:
    config = distill_config(toy, "gkd", gkd_lambda=0.0, group_size=2, max_prompt_length=40)
    models = toy_models(config)
    prompts = load_prompts(models.chat, config)
    rows = {row.prompt: row for row in load_step_rows(config, step=3).train}
    expected = [rows[prompt.messages] for prompt in prompts.first_batch().prompts]
    encoded = [models.chat.encode(row.prompt, row.chosen) for row in expected]

    sampled = sample_rollout(models, prompts, config)
    experience = score_responses(models, sampled.inputs, sampled.responses, config, step=1)
    rollout = compute_advantages(experience, torch.zeros(8), config, kl_coef=0.0)

    kept = zip(encoded, sampled.inputs, strict=True)
    assert experience.sequences == [row.head(len(ids) + config.max_new_tokens) for row, ids in kept]
    assert experience.stopped.tolist() == [
        sequence.input_ids[-1] == END for sequence in experience.sequences
    ]
    assert torch.equal(experience.sampled_logprobs, experience.logprobs)
    assert (sampled.metrics, models.hybrid_engine.seconds) == ({"on_policy": 0.0}, 0.0)
    batch, device = collate(experience.sequences), torch.device("cpu")
    log_p, log_q = (
        Policy(load_causal_lm(source, device=device, seed=0)).logits(batch).log_softmax(1)
        for source in (config.actor, config.teacher)
    )
    mixture = ((log_p.exp() + log_q.exp()) / 2).log()
    terms = log_p.exp() * (log_p - mixture) + log_q.exp() * (log_q - mixture)
    loss = run_update(models, rollout, config).metrics["policy_loss"]
    assert loss == pytest.approx(terms.sum().item() / 2 / len(terms), rel=1e-4)


def test_every_row_needs_a_demonstration(toy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "chosen": "1"} if n else {"prompt": "0"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=(str(tmp_path / "rows.jsonl"),), split=(0, 0, 1), eval_fraction=0.25)
    config = distill_config(toy, "gkd", gkd_lambda=0.9, data=data, rollout_size=2, batch_size=2)
    with pytest.raises(DataError, match=r"rows\.jsonl line \d: the row has no response to learn"):
        load_prompts(load_chat(config.actor, config.data), config)


@pytest.mark.parametrize("method", ["distill", "gkd", "mixed"])
def test_run_uses_only_actor_and_teacher_and_resumes(
    toy: Path, tmp_path: Path, method: str
) -> None:
    settings = {"max_steps": 2, "save_every": 1, "keep_best": False, "max_prompt_length": 40}
    if method == "mixed":
        method, settings["gkd_lambda"] = "gkd", 0.5
    settings |= {"kl_coef": 2.0} if method == "distill" else {}
    config = distill_config(toy, method, **settings)
    config = replace(config, data=replace(config.data, max_eval_rows=4))
    runs = run_full_and_resumed(config, tmp_path)

    first, second = (tmp_path / name / "actor/model.safetensors" for name in ("full", "resumed"))
    assert first.read_bytes() == second.read_bytes()
    assert config.unused_roles == {"critic", "reward", "reference"}
    assert [model.role for model in config.workload(1).models] == ["actor", "teacher", "base"]
    full, resumed = ([line for line in lines if "reverse_kl" in line] for lines in runs)
    for line, other in zip(full, resumed, strict=True):
        assert line["reverse_kl"] == other["reverse_kl"]
        assert line.get("on_policy") == other.get("on_policy")
        assert line["score"] == pytest.approx(-line["reverse_kl"] * line["response_length"])
    figures = json.loads((tmp_path / "full/result.json").read_text())["eval"]
    assert (figures["score_before"] < 0, figures["kl"], "kl" in line) == (True, None, False)


def test_served_teacher_matches_a_local_one(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = distill_config(toy)
    rollout = sample_on_policy(toy_models(config), config)
    with serving((ModelPath("teacher", str(toy / "teacher")),), log_requests=False) as running:
        served = replace(config, teacher=FrozenModelConfig(), teacher_url=f"{running.url}/v1")
        models = toy_models(served)
        remote = sample_on_policy(models, served)
        assert (models.reference, served.unused_roles >= {"teacher"}) == (None, True)
        with pytest.raises(ModelError, match="differs from the actor's"):
            ServedTeacher(running.url, byte_level())

    actual, expected = (r.experience.ref_logprobs for r in (remote, rollout))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert torch.equal(remote.experience.logprobs, rollout.experience.logprobs)
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    with pytest.raises(ConfigError, match="would send TEACHER_API_KEY unencrypted"):
        ServedTeacher("http://192.0.2.1:8000/v1", byte_level())
    with pytest.raises(ConfigError, match="temperature must be 1 with"):
        replace(served, temperature=0.7)


def test_invalid_teacher_is_rejected(toy: Path, tmp_path: Path) -> None:
    config = distill_config(toy)
    byte_level().save_pretrained(shutil.copytree(toy / "teacher", tmp_path / "teacher"))
    with pytest.raises(ModelError, match=r"the actor and \S+ have different tokenizers"):
        toy_models(replace(config, teacher=FrozenModelConfig(path=str(tmp_path / "teacher"))))
    with pytest.raises(ConfigError, match="--method distill has no teacher; set --teacher"):
        replace(config, teacher=FrozenModelConfig())
    sources = (RewardConfig(name="right", kind="math"),)
    with pytest.raises(ConfigError, match="--method distill learns from its teacher alone: omit"):
        replace(config, rewards=sources)
    with pytest.raises(ConfigError, match="--teacher requires --method distill or gkd, not grpo"):
        replace(config, method="grpo", output_dir=Path("out/step3_ppo"))
    gkd = distill_config(toy, "gkd")
    with pytest.raises(ConfigError, match="gkd compares all logits, which servers don't return"):
        replace(gkd, teacher=FrozenModelConfig(), teacher_url="http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="--method gkd learns from its teacher alone"):
        replace(gkd, entropy_coef=0.1)
    with pytest.raises(ConfigError, match=r"omit .* ppo\.overlong_buffer"):
        replace(gkd, overlong_buffer=2)
