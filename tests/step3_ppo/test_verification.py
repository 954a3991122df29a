"""The judge's figures of a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.held_out import Prompt, judge_samples
from pipeline.data.examples import Message
from pipeline.demo.task import held_out_questions
from step3_ppo.evaluate import HeldOut
from tests.step3_ppo.toy import toy_config, toy_models


@pytest.mark.jobs
def test_verifier_scores_run_and_hand_written_prompts(toy: Path, tmp_path: Path) -> None:
    config = toy_config(toy)
    models = toy_models(config)
    dialogues = [(Message("user", question.text),) for question in held_out_questions()[:2]]
    prompts = [Prompt(messages, models.chat.encode_prompt(messages)) for messages in dialogues]
    held_out = HeldOut(models, prompts, config)
    answers = held_out.answer_all()
    answers.sampled[0] = replace(answers.sampled[0], score=float("nan"))  # its source failed

    answers_by_model = {"step1_sft": answers, "step3_ppo": answers}
    figures = judge_samples(held_out, answers_by_model, tmp_path / "samples.json")

    assert figures["judge"] == {"step1_sft": 0.0, "step3_ppo": 0.0}  # untrained
    assert figures["judge_talk"] == 0.0
    samples = json.loads((tmp_path / "samples.json").read_text(), parse_constant=pytest.fail)
    rows = [row["answers"]["step3_ppo"] for row in samples["rows"]]
    assert [answer["text"] for answer in rows] == [response.text for response in answers.sampled]
    assert [answer["greedy"]["text"] for answer in rows] == [
        response.text for response in answers.greedy
    ]
