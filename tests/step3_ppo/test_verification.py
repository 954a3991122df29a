"""The judge's part of a run's figures."""

import json
from pathlib import Path

import pytest

from evaluation.held_out import Prompt, conclude
from pipeline.data.examples import Message
from pipeline.demo.task import held_out_questions
from step3_ppo.evaluate import HeldOut
from tests.step3_ppo.toy import toy_config, toy_models


@pytest.mark.jobs
def test_on_the_embedded_task_the_verifier_judges_the_run_and_hand_written_prompts(
    toy: Path, tmp_path: Path
) -> None:
    config = toy_config(toy)
    models = toy_models(config)
    asked = [(Message("user", question.text),) for question in held_out_questions()[:2]]
    prompts = [Prompt(messages, models.chat.encode_prompt(messages)) for messages in asked]
    held = HeldOut(models, prompts, config)
    answers = held.answer_all()

    named = {"step1_sft": answers, "step3_ppo": answers}
    figures = conclude(held, named, tmp_path / "samples.json")

    assert figures["judge"] == {"step1_sft": 0.0, "step3_ppo": 0.0}  # untrained
    assert figures["judge_talk"] == 0.0
    samples = json.loads((tmp_path / "samples.json").read_text())
    shown = [row["answers"]["step3_ppo"] for row in samples["rows"]]
    assert [answer["text"] for answer in shown] == [each.text for each in answers.sampled]
    assert [answer["greedy"]["text"] for answer in shown] == [each.text for each in answers.greedy]
