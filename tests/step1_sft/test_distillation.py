"""Step 1 learns from a teacher's stored log-probabilities."""

import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from inference.generate import main as generate
from pipeline.config import DataConfig, FrozenModelConfig
from pipeline.data.batches import TokenBatch
from pipeline.data.examples import Example, Message
from pipeline.data.sharing.prompts import fingerprint
from pipeline.data.teacher import TeacherTokens
from pipeline.models.forward.vocab_parallel import LARGE
from pipeline.models.hf.chat import load_chat
from pipeline.system.errors import ConfigError, DataError
from step1_sft.distillation import distillation_loss
from tests.distributed import run_ranks
from tests.inference.test_responses import read_rows, write_rows
from tests.step1_sft.small_runs import interrupt, make_config, outcome, run, write_task


def respond(teacher: Path, prompts: range, out: Path, *options: str) -> list[dict[str, Any]]:
    rows = [{"prompt": f"Add {n} and 1."} for n in prompts]
    paths = ("--prompts", str(write_rows(out.with_name("in.jsonl"), rows)), "--out", str(out))
    options = options if "--temperature" in options else (*options, "--temperature", "1")
    generate(["--path", str(teacher), *paths, "--max-new-tokens", "9", *options])
    return read_rows(out)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher with less random distributions, and its responses to 40 prompts."""
    task = write_task(tmp_path_factory.mktemp("task"), "llama")
    shutil.copytree(task / "base", task / "teacher")
    teacher = AutoModelForCausalLM.from_pretrained(task / "teacher")
    teacher.lm_head.weight.data.mul_(10)
    teacher.save_pretrained(task / "teacher")
    respond(task / "teacher", range(40), task / "rows.jsonl", "--top-logprobs", "5")
    return task


def student_logprobs(model: Path, row: dict[str, Any]) -> torch.Tensor:
    prompt = (Message("user", row["prompt"]),)
    ids = load_chat(FrozenModelConfig(path=str(model)), DataConfig()).encode_prompt(prompt)
    inputs = torch.tensor([ids + row["token_ids"][0]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(inputs).logits
    return logits[0, len(ids) - 1 : -1].log_softmax(dim=1)


def metrics(out: Path, name: str) -> list[float]:
    return [line[name] for line in read_rows(out / "metrics.jsonl") if name in line]


def test_loss_and_gradient_of_a_uniform_student() -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    top = torch.tensor([[2, 0]]), torch.tensor([[0.5, 0.25]]).log()
    batch = TokenBatch(torch.tensor([3, 1]), (2,), torch.tensor([1]), teacher=top)

    loss, kl = distillation_loss(logits, batch=batch, weight=0.5)
    loss.backward()

    assert kl.item() == pytest.approx(0.25 * math.log(2))  # buckets 0.5, 0.25, 0.25
    assert loss.item() == pytest.approx((math.log(4) + 0.25 * math.log(2)) / 2)
    torch.testing.assert_close(logits.grad, torch.tensor([[0.125, -0.3125, 0.0, 0.1875]]))


@pytest.mark.parametrize(("weight", "count", "layer"), [(0.3, 3, True), (1.0, 7, False)])
def test_tiled_loss_matches_its_definition(weight: float, count: int, layer: bool) -> None:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    tensors = [draw(5, 4), draw(7, 4), draw(7)]
    inputs = [x.requires_grad_() for x in (tensors if layer else [F.linear(*tensors)])]
    teacher = draw(5, 7).log_softmax(dim=1)
    logprobs, ids = teacher.topk(count)
    token_ids = torch.tensor([0, 4, 0, 6, 2, 2])
    batch = TokenBatch(token_ids, (6,), torch.arange(1, 6), teacher=(ids, logprobs.float()))
    student = (F.linear(*inputs) if layer else inputs[0]).log_softmax(dim=1)
    p, q = (
        torch.cat([x.exp().gather(1, ids), x.exp().scatter(1, ids, 0.0).sum(1, keepdim=True)], 1)
        for x in (student, teacher)
    )
    expected_kl = (torch.xlogy(q, q) - torch.xlogy(q, p)).sum()
    nll = F.nll_loss(student, token_ids[1:], reduction="sum")
    expected = torch.autograd.grad((1 - weight) * nll + weight * expected_kl, inputs)

    low = [x.detach().float().requires_grad_() for x in inputs]
    loss, kl = distillation_loss(*low, batch=batch, weight=weight, tile=14)

    torch.testing.assert_close(kl.double(), expected_kl.detach(), rtol=1e-5, atol=1e-5)
    for actual, target in zip(torch.autograd.grad(2 * loss, low), expected, strict=True):
        torch.testing.assert_close(actual.double(), 2 * target, rtol=1e-4, atol=1e-5)


def test_stored_logprobs_are_those_at_temperature_one(task: Path, tmp_path: Path) -> None:
    options = ("--top-logprobs", "4", "--stop", "a", "--temperature", "0.5")
    (row,) = respond(task / "teacher", range(1), tmp_path / "out.jsonl", *options)
    expected = student_logprobs(task / "teacher", row).topk(4)

    assert row["top_token_ids"][0] == expected.indices.tolist()
    actual = torch.tensor(row["top_logprobs"][0])
    torch.testing.assert_close(actual, expected.values, rtol=0, atol=1e-4)
    assert "top_logprobs" not in respond(task / "teacher", range(1), tmp_path / "plain.jsonl")[0]


def test_distilled_student_is_closer_to_its_teacher(task: Path, tmp_path: Path) -> None:
    held_out = respond(task / "teacher", range(50, 60), tmp_path / "out.jsonl")
    results: list[float] = []
    for weight in (0.0, 1.0):
        out = tmp_path / str(weight)
        config = make_config(task, out, distill_weight=weight, max_steps=30)
        run(replace(config, data=replace(config.data, split=(1.0, 0.0, 0.0))))
        pairs = [[student_logprobs(m, r) for m in (out, task / "teacher")] for r in held_out]
        kl = partial(F.kl_div, log_target=True, reduction="sum")
        results.append(sum(kl(*pair).item() for pair in pairs))

    assert results[1] < 0.8 * results[0]
    kls = metrics(tmp_path / "1.0", "teacher_kl")
    assert kls == pytest.approx(metrics(tmp_path / "1.0", "loss"))
    first, second = (metrics(tmp_path / out, "eval_perplexity")[0] for out in ("0.0", "1.0"))
    assert first == pytest.approx(second)


def test_fingerprint_depends_on_the_trained_tokens() -> None:
    top = np.array([[1, 2]]), np.array([[-1, -2]], np.float32)
    teachers = [TeacherTokens(np.array([i]), *top, end) for i in (1, 3) for end in (True, False)]
    prints = {fingerprint([Example((Message("user", "Q"),), teacher=t)]) for t in teachers}
    assert len(prints) == 4


def test_resumed_run_is_equal_and_rejects_other_logprobs(task: Path, tmp_path: Path) -> None:
    task = Path(shutil.copytree(task, tmp_path / "task"))
    common: dict[str, Any] = {"distill_weight": 0.5, "save_every": 1, "keep_last": 9}
    run(make_config(task, tmp_path / "full", **common))
    out = interrupt(tmp_path / "full", tmp_path / "out")

    run(make_config(task, out, resume=True, **common))

    assert outcome(out) == outcome(tmp_path / "full")
    text = (task / "rows.jsonl").read_text()
    (task / "rows.jsonl").write_text(text.replace('"top_logprobs": [[[-', '"top_logprobs": [[[-9'))
    with pytest.raises((ConfigError, DataError), match="rows"):
        run(make_config(task, interrupt(tmp_path / "full", tmp_path / "x"), resume=True, **common))


@pytest.mark.jobs
def test_layouts_agree_on_a_large_vocabulary(task: Path, tmp_path: Path) -> None:
    write_task(tmp_path, "llama", vocab_size=LARGE)
    shutil.copy(task / "rows.jsonl", tmp_path / "rows.jsonl")
    config = partial(make_config, tmp_path, distill_weight=0.5)
    run(config(tmp_path / "alone"))
    run(config(tmp_path / "small", micro_batch_size=1, model={"kernels": "off"}))
    for out, layout in (("pp", {"pp": 2}), ("tp", {"tp": 2}), ("dp", {"model": {"zero_stage": 3}})):
        run_ranks(run, config(tmp_path / out, **layout))

    for out in ("small", "pp", "tp", "dp"):
        for name in ("loss", "teacher_kl", "grad_norm"):
            expected = metrics(tmp_path / "alone", name)
            assert metrics(tmp_path / out, name) == pytest.approx(expected, rel=1e-4), (out, name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda row: row["token_ids"][0].reverse(), "have another meaning for the student"),
        (lambda row: row["top_token_ids"][0][0].__setitem__(0, 10**6), "unused ids are among the"),
        (lambda row: row["top_token_ids"][0].__setitem__(0, [3] * 5), "must be lists with"),
        (lambda row: row["top_logprobs"][0][0].pop(), "must be lists with"),
        (lambda row: row["top_logprobs"][0].__setitem__(0, [-0.1] * 5), "must be lists with"),
        (lambda row: row.update(answers=[]), "must be lists with"),
        (lambda row: row.update(response="Hi", top_logprobs=None), "has no top_logprobs"),
        (lambda row: row.update(stop=["eos"]), "doesn't end a turn"),
    ],
)
def test_unusable_rows_are_rejected(edit: Any, message: str, task: Path, tmp_path: Path) -> None:
    task = Path(shutil.copytree(task, tmp_path / "task"))
    rows = read_rows(task / "rows.jsonl")
    for row in rows:
        edit(row)
    write_rows(task / "rows.jsonl", rows)

    with pytest.raises(DataError, match=rf"rows\.jsonl line \d+: .*{message}"):
        run(make_config(task, tmp_path / "out", distill_weight=0.5))
