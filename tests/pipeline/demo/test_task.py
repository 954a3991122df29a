"""The embedded task: what is held out, the quality of its rows, and the verifier."""

import hashlib
from collections import Counter

import pytest

from pipeline.data.sharing.steps import embedded_examples
from pipeline.demo.task import (
    DEMONSTRATIONS,
    HAND_WRITTEN,
    HELD_OUT_PROMPTS,
    MEMORIZED,
    PAIRS,
    POLITE,
    PROMPTS,
    RUDE,
    TaskRow,
    Verdict,
    facts,
    held_out_questions,
    kinds,
    split_facts,
    step_rows,
    verdict,
    verify,
)

TRUE_ANSWERS = frozenset(fact.answer for fact in facts())


def verdicts(rows: list[TaskRow], side: str) -> list[Verdict]:
    results = [verify(row.prompt, getattr(row, side)) for row in rows]
    return [result for result in results if result is not None]


def test_held_out_prompts_have_held_out_facts_unless_memorized() -> None:
    questions = held_out_questions()
    trained, held_out = map(set, split_facts())

    assert Counter(q.fact.kind for q in questions) == HELD_OUT_PROMPTS
    assert len({q.text for q in questions}) == len(questions) == 300
    assert trained | held_out == set(facts())
    assert not trained & held_out
    assert {fact.kind for fact in held_out} == set(kinds()) - set(MEMORIZED)
    for question in questions:
        assert (question.fact in trained) == (question.fact.kind in MEMORIZED)
    subjects = {(fact.kind, fact.subject) for fact in trained}
    assert not {(fact.kind, fact.subject[::-1]) for fact in held_out} & subjects


def test_steps_share_no_training_prompt_with_any_seeds() -> None:
    prompts = {
        (step, seed): {row.prompt.lower() for row in step_rows(step=step, seed=seed)[0]}
        for step, seed in ((1, 3), (2, 3), (3, 3), (3, 4))
    }
    held_out = {q.text.lower() for q in held_out_questions()}
    held_out |= {prompt.text.lower() for prompt in HAND_WRITTEN}

    for (step, _), texts in prompts.items():
        assert not texts & held_out
        for (other_step, _), other_texts in prompts.items():
            assert step == other_step or not texts & other_texts


@pytest.mark.parametrize(("step", "digest"), [(1, "5d7f180c"), (2, "2f0bc6c3"), (3, "485074b1")])
def test_only_training_rows_depend_on_the_seed(step: int, digest: str) -> None:
    train, evaluation = step_rows(step=step, seed=3)

    assert hashlib.sha256(repr((train, evaluation)).encode()).hexdigest()[:8] == digest
    assert train != step_rows(step=step, seed=4)[0]
    assert evaluation == step_rows(step=step, seed=4)[1]
    assert {row.prompt for row in evaluation} <= {q.text for q in held_out_questions()}


def test_demonstrations_are_85_percent_correct_40_percent_polite() -> None:
    train, evaluation = step_rows(step=1, seed=3)

    results = verdicts(evaluation, "chosen")

    assert len(train) == DEMONSTRATIONS
    assert len(results) == 512
    for name, share in (("correct", 0.85), ("polite", 0.4), ("both", 0.34)):
        count = sum(getattr(result, name) for result in results)
        assert count / 512 == pytest.approx(share, abs=0.05)
    polite = sum(row.chosen.startswith(POLITE) for row in train)
    assert polite / DEMONSTRATIONS == pytest.approx(0.4, abs=0.01)


def test_chosen_response_is_better_by_correctness_then_politeness() -> None:
    train, evaluation = step_rows(step=2, seed=3)

    chosen, rejected = verdicts(evaluation, "chosen"), verdicts(evaluation, "rejected")

    for better, worse in zip(chosen, rejected, strict=True):
        assert (better.correct, better.polite) > (worse.correct, worse.polite)
    assert (len(train), len(chosen)) == (PAIRS, 512)


def test_step_3_has_each_prompt_once_without_a_response() -> None:
    train, evaluation = embedded_examples(step=3, seed=3)

    assert (len(train), len(evaluation)) == (PROMPTS, 300)
    assert len({example.prompt for example in train}) == len(train)
    assert all(not example.chosen and example.extra["answer"] in TRUE_ANSWERS for example in train)


CAPITAL = "The capital of Peru is Lima."


def test_verifier_accepts_the_correct_answer_in_every_tone() -> None:
    for opening in POLITE:
        assert verdict("capital", CAPITAL, f" {opening} {CAPITAL}\n").both
    for opening in RUDE:
        rude = verdict("capital", CAPITAL, f"{opening} {CAPITAL}")
        assert (rude.correct, rude.polite, rude.both) == (True, False, False)
    assert verdict("capital", CAPITAL, CAPITAL) == Verdict("capital", True, False)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "Sure!",
        "Sure! The capital of Peru is Oslo.",
        "Sure! The capital of Peru is Lima",
        f"Sure! Sure! {CAPITAL}",
        f"Sure! {CAPITAL} {CAPITAL}",
        f"Sure! {CAPITAL} Human: Thanks.",
        f"Surely! {CAPITAL}",
        f"Sure! {CAPITAL} Whatever.",
    ],
)
def test_verifier_rejects_any_other_response(response: str) -> None:
    result = verdict("capital", CAPITAL, response)

    assert not result.correct
    assert result.polite == (response.startswith("Sure!") and "Whatever" not in response)
