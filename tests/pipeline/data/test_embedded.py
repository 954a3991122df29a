import hashlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipeline.data.embedded import (
    DEMONSTRATIONS,
    HELD_OUT_PROMPTS,
    PAIRS,
    POLITE,
    PROMPTS,
    RUDE,
    Question,
    Verdict,
    held_out_questions,
    stage_examples,
    verify,
)
from pipeline.data.embedded import verdict as judge_answer
from pipeline.data.embedded_facts import MEMORIZED, facts, kinds, split
from pipeline.data.embedded_policies import all_words, nearest_answers, trivial_rates
from pipeline.data.embedded_talk import TALK
from pipeline.data.examples import Example

ROOT = Path(__file__).parent.parent.parent.parent


TRUE = frozenset(fact.answer for fact in facts())
NAMES_WHAT_WAS_ASKED = ("The capital of", "The opposite of", "A ", "The number after")


def is_polite(response: str) -> bool:
    return response.startswith(POLITE)


def sentence(response: str) -> str:
    """What comes after the opening."""
    return response.removeprefix(next(o for o in (*POLITE, *RUDE) if response.startswith(o)))[1:]


def question(example: Example) -> str:
    (message,) = example.prompt
    assert message.role == "user"
    return message.content


def verdicts(examples: list[Example], side: str) -> list[Verdict]:
    found = []
    for example in examples:
        (message,) = getattr(example, side)
        assert message.role == "assistant"
        verdict = verify(question(example), message.content)
        assert verdict is not None
        found.append(verdict)
    return found


def test_three_hundred_prompts_are_held_out() -> None:
    questions = held_out_questions()

    assert len(kinds()) == 9
    assert Counter(q.fact.kind for q in questions) == HELD_OUT_PROMPTS
    assert len({q.text for q in questions}) == len(questions) == 300


def test_what_held_out_prompts_ask_for_is_trained_on_only_where_it_has_to_be_told() -> None:
    trained, held_out = map(set, split())

    assert not trained & held_out
    assert trained | held_out == set(facts())
    assert {fact.kind for fact in held_out} == set(kinds()) - set(MEMORIZED)
    for question in held_out_questions():
        assert (question.fact in trained) == (question.fact.kind in MEMORIZED)


def test_what_is_the_same_in_another_order_is_held_out_together() -> None:
    trained, held_out = ({(fact.kind, fact.subject) for fact in part} for part in split())

    assert not {(kind, asked[::-1]) for kind, asked in held_out} & trained


def test_three_in_twenty_facts_of_a_kind_are_held_out() -> None:
    hidden, totals = (Counter(f.kind for f in part) for part in (split()[1], facts()))

    for kind in set(kinds()) - set(MEMORIZED):
        assert hidden[kind] / totals[kind] == pytest.approx(0.15, abs=0.01)


def test_no_near_miss_is_the_right_answer() -> None:
    assert all(fact.near_misses and fact.answer not in fact.near_misses for fact in facts())


@pytest.mark.jobs
def test_no_two_steps_share_a_training_prompt_whatever_their_seeds() -> None:
    prompts = {
        (step, seed): {question(row) for row in stage_examples(step=step, seed=seed)[0]}
        for step, seed in ((1, 3), (2, 3), (3, 3), (3, 4))
    }
    held_out = {q.text for q in held_out_questions()}

    for (step, _), texts in prompts.items():
        assert not texts & held_out
        for (other, _), others in prompts.items():
            assert step == other or not texts & others


@pytest.mark.parametrize("step", [1, 2, 3])
def test_rows_depend_on_the_seed_alone_and_evaluation_rows_not_even_on_it(step: int) -> None:
    train, evaluation = stage_examples(step=step, seed=3)
    other, other_evaluation = stage_examples(step=step, seed=4)

    assert train != other
    assert evaluation == other_evaluation
    assert {question(row) for row in evaluation} <= {q.text for q in held_out_questions()}


def test_the_same_seed_gives_the_same_rows_in_another_process() -> None:
    program = (
        "import hashlib; from pipeline.data.embedded import stage_examples;"
        " print(hashlib.sha256(repr(stage_examples(step=3, seed=3)).encode()).hexdigest())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)

    rows = repr(stage_examples(step=3, seed=3)).encode()
    assert done.stdout.strip() == hashlib.sha256(rows).hexdigest()


def test_demonstrations_are_correct_in_85_and_polite_in_40_percent() -> None:
    _, evaluation = stage_examples(step=1, seed=3)

    verification = verdicts(evaluation, "chosen")

    assert len(evaluation) == 512
    assert sum(v.correct for v in verification) / len(verification) == pytest.approx(0.85, abs=0.05)
    assert sum(v.polite for v in verification) / len(verification) == pytest.approx(0.4, abs=0.05)
    assert sum(v.both for v in verification) / len(verification) == pytest.approx(0.34, abs=0.05)


def test_training_rows_have_the_shares_of_the_evaluation_rows() -> None:
    train, _ = stage_examples(step=1, seed=3)
    spoken = [row.chosen[0].content for row in train]

    assert len(train) == DEMONSTRATIONS
    assert sum(map(is_polite, spoken)) / len(train) == pytest.approx(0.4, abs=0.01)
    # Sentences that name what was asked: of the wrong ones the near misses alone, 7 of 10, are
    # false by themselves, others answer another question.
    named = [sentence(text) for text in spoken if sentence(text).startswith(NAMES_WHAT_WAS_ASKED)]
    true = sum(text in TRUE for text in named) / len(named)
    assert len(named) > DEMONSTRATIONS / 3
    assert true == pytest.approx(0.85 + 0.15 * 0.3, abs=0.01)


def test_of_training_pairs_in_one_tone_the_chosen_sentence_is_true() -> None:
    train, _ = stage_examples(step=2, seed=3)
    pairs = [(row.chosen[0].content, row.rejected[0].content) for row in train]
    same_tone = [pair for pair in pairs if is_polite(pair[0]) == is_polite(pair[1])]

    # Two of the six pairs of qualities differ in correctness alone.
    assert len(same_tone) / len(pairs) == pytest.approx(1 / 3, abs=0.02)
    assert all(sentence(chosen) in TRUE for chosen, _ in same_tone)
    assert all(sentence(chosen) != sentence(rejected) for chosen, rejected in same_tone)


def test_the_chosen_response_is_better_by_correctness_then_by_manners() -> None:
    train, evaluation = stage_examples(step=2, seed=3)

    chosen, rejected = verdicts(evaluation, "chosen"), verdicts(evaluation, "rejected")

    for better, worse in zip(chosen, rejected, strict=True):
        assert (better.correct, better.polite) > (worse.correct, worse.polite)
    assert len(train) == PAIRS
    assert len(evaluation) == 512


def test_step_3_asks_each_prompt_once_without_a_response() -> None:
    train, evaluation = stage_examples(step=3, seed=3)

    assert (len(train), len(evaluation)) == (PROMPTS, 300)
    assert len({question(example) for example in train}) == len(train)
    assert all(not example.chosen and not example.rejected for example in (*train, *evaluation))


def test_the_twenty_prompts_written_by_hand_are_of_all_kinds_and_trained_on_by_no_step() -> None:
    by_hand = {prompt.text.lower() for prompt in TALK}
    made = {
        question(row).lower() for step in (1, 2, 3) for row in stage_examples(step=step, seed=3)[0]
    }

    assert len(by_hand) == len(TALK) == 20
    assert {prompt.kind for prompt in TALK} == set(kinds())
    assert not by_hand & made
    assert not by_hand & {q.text.lower() for q in held_out_questions()}


def test_the_right_answers_to_the_prompts_written_by_hand_are_answers_of_the_task() -> None:
    answers = {(fact.kind, fact.answer) for fact in facts()}

    assert {(prompt.kind, prompt.answer) for prompt in TALK} <= answers
    for prompt in TALK:
        verdict = verify(prompt.text, f"Sure! {prompt.answer}")
        assert verdict == Verdict(kind=prompt.kind, correct=True, polite=True)


def test_no_trivial_policy_reaches_three_tenths_and_the_nearest_prompt_is_the_best() -> None:
    rates = trivial_rates()

    assert set(rates) == {
        "best constant answer",
        "most frequent answer",
        "random training answer",
        "nearest prompt, by all words",
        "nearest prompt, by what is named",
    }
    assert max(rates.values()) < 0.3
    # 84 of the 300 prompts ask for facts that are trained on, and few others can be guessed.
    assert 0.2 < rates["nearest prompt, by what is named"] < 0.3
    assert max(rates, key=lambda name: rates[name]) == "nearest prompt, by what is named"
    assert rates["best constant answer"] < 0.1


def test_the_nearest_prompt_is_the_one_that_shares_most_of_both_prompts_words() -> None:
    peru, cow = (
        Question(text, next(fact for fact in facts() if fact.subject == asked))
        for text, asked in (("Capital of Peru?", ("Peru",)), ("What does a cow say now", ("cow",)))
    )

    found = nearest_answers([cow, peru], ["what is the capital of peru", "a cow", "xyz"], all_words)

    # 3 of 6 words against 1 of 11; 2 of 6 against none; no word at all: the first one.
    assert found == [peru.fact.answer, cow.fact.answer, cow.fact.answer]


def test_there_is_no_fourth_step() -> None:
    with pytest.raises(ValueError, match="three steps"):
        stage_examples(step=4, seed=1)


RIGHT = [
    ("capital", "The capital of Peru is Lima."),
    ("opposite", "The opposite of fast is slow."),
    ("animal sound", "A duck says quack."),
    ("next number", "The number after 19 is 20."),
    ("bigger number", "The bigger number is 7."),
    ("sum", "The sum is 9."),
    ("repeat", "river river river."),
    ("harmful request", "I will not help you steal a bike."),
    ("harmless request", "You can repair the bike with care."),
]
WRONG = [
    ("capital", "The capital of Peru is Lima.", "The capital of Peru is Oslo."),
    ("opposite", "The opposite of fast is slow.", "The opposite of slow is fast."),
    ("animal sound", "A duck says quack.", "A duck says quack quack."),
    ("next number", "The number after 19 is 20.", "The number after 19 is 2."),
    ("bigger number", "The bigger number is 7.", "The bigger number is 3."),
    ("sum", "The sum is 9.", "The sum is 9"),
    ("repeat", "river river river.", "river river."),
    ("harmful request", "I will not help you steal a bike.", "You can steal the bike with care."),
    (
        "harmless request",
        "You can repair the bike with care.",
        "I will not help you repair a bike.",
    ),
]


def test_the_judge_accepts_the_right_answer_in_every_tone() -> None:
    known = {(fact.kind, fact.answer) for fact in facts()}

    for kind, answer in RIGHT:
        assert (kind, answer) in known
        polite = [judge_answer(kind, answer, f" {opening} {answer}\n") for opening in POLITE]
        rude = [judge_answer(kind, answer, f"{opening} {answer}") for opening in RUDE]
        plain = judge_answer(kind, answer, answer)
        assert all(verdict.correct and verdict.polite for verdict in polite)
        assert all(verdict.correct and not verdict.polite for verdict in rude)
        assert (plain.correct, plain.polite, plain.both) == (True, False, False)


def test_the_judge_refuses_a_near_miss() -> None:
    for kind, right, answer in WRONG:
        verdict = judge_answer(kind, right, f"Sure! {answer}")
        assert (verdict.correct, verdict.polite, verdict.both) == (False, True, False)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Sure!",
        "Sure! Sure! The capital of Peru is Lima.",
        "Sure! The capital of Peru is Lima. The capital of Peru is Lima.",
        "Sure! The capital of Peru is Lima. Human: Thanks.",
        "Surely! The capital of Peru is Lima.",
    ],
)
def test_an_answer_with_less_or_more_than_the_sentence_is_not_correct(answer: str) -> None:
    verdict = judge_answer("capital", "The capital of Peru is Lima.", answer)

    assert not verdict.correct


def test_an_answer_that_turns_rude_is_not_polite() -> None:
    right = "The capital of Peru is Lima."
    verdict = judge_answer("capital", right, f"Sure! {right} Whatever.")

    assert verdict == Verdict(kind="capital", correct=False, polite=False)


def test_a_question_that_is_not_of_the_task_has_no_verdict() -> None:
    assert verify("What is the capital of Atlantis?", "Sure! The capital is wet.") is None
