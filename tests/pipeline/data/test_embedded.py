from collections import Counter

import pytest

from pipeline.data.embedded import DEMONSTRATIONS, PAIRS, Verdict, judge, stage_examples
from pipeline.data.embedded_facts import POLITE, RUDE, facts, kinds, split
from pipeline.data.examples import Example


def question(example: Example) -> str:
    (message,) = example.prompt
    assert message.role == "user"
    return message.content


def verdicts(examples: list[Example], side: str) -> list[Verdict]:
    found = []
    for example in examples:
        (message,) = getattr(example, side)
        assert message.role == "assistant"
        verdict = judge(question(example), message.content)
        assert verdict is not None
        found.append(verdict)
    return found


def test_the_task_has_nearly_two_thousand_prompts_of_nine_kinds() -> None:
    texts = [text for fact in facts() for text in fact.wordings]

    assert len(kinds()) == 9
    assert 1_850 <= len(texts) <= 2_150
    assert len(set(texts)) == len(texts)


def test_twelve_percent_of_each_kind_are_held_out() -> None:
    train, held_out = split()
    totals = Counter(question.fact.kind for question in (*train, *held_out))
    hidden = Counter(question.fact.kind for question in held_out)

    assert not {q.text for q in train} & {q.text for q in held_out}
    assert sum(totals.values()) == sum(len(fact.wordings) for fact in facts())
    for kind in kinds():
        assert hidden[kind] == round(0.12 * totals[kind])


def test_every_fact_is_asked_in_training_in_all_wordings_but_at_most_one() -> None:
    train, _ = split()
    trained = Counter(question.fact for question in train)

    assert all(trained[fact] >= len(fact.wordings) - 1 for fact in facts())


def test_no_near_miss_is_the_right_answer() -> None:
    assert all(fact.near_misses and fact.answer not in fact.near_misses for fact in facts())


@pytest.mark.parametrize("step", [1, 2, 3])
def test_training_rows_never_ask_a_held_out_question(step: int) -> None:
    trained_prompts, held_out_prompts = ({q.text for q in part} for part in split())

    train, evaluation = stage_examples(step=step, seed=3)

    assert {question(example) for example in train} <= trained_prompts
    assert {question(example) for example in evaluation} <= held_out_prompts


@pytest.mark.parametrize("step", [1, 2, 3])
def test_rows_depend_on_the_seed_alone_and_evaluation_rows_not_even_on_it(step: int) -> None:
    train, evaluation = stage_examples(step=step, seed=3)
    again, _ = stage_examples(step=step, seed=3)
    other, other_evaluation = stage_examples(step=step, seed=4)

    assert train == again
    assert train != other
    assert evaluation == other_evaluation


def test_demonstrations_are_correct_in_60_and_polite_in_50_percent() -> None:
    train, evaluation = stage_examples(step=1, seed=5)

    judged = verdicts(train, "chosen")

    assert len(train) == DEMONSTRATIONS == 48_000
    assert len(evaluation) == 512
    assert sum(v.correct for v in judged) / len(judged) == pytest.approx(0.6, abs=0.01)
    assert sum(v.polite for v in judged) / len(judged) == pytest.approx(0.5, abs=0.01)
    assert sum(v.both for v in judged) / len(judged) == pytest.approx(0.3, abs=0.01)
    counts = Counter(v.kind for v in judged)
    assert min(counts.values()) > 0.95 * DEMONSTRATIONS / 9


def test_the_chosen_response_is_better_by_correctness_then_by_manners() -> None:
    train, evaluation = stage_examples(step=2, seed=5)

    for rows in (train, evaluation):
        chosen, rejected = verdicts(rows, "chosen"), verdicts(rows, "rejected")
        for better, worse in zip(chosen, rejected, strict=True):
            assert (better.correct, better.polite) > (worse.correct, worse.polite)

    assert len(train) == PAIRS == 19_200
    assert len(evaluation) >= 500


def test_step_3_asks_each_prompt_once_without_a_response() -> None:
    train, evaluation = stage_examples(step=3, seed=5)

    assert (len(train), len(evaluation)) == tuple(len(part) for part in split())
    assert len({question(example) for example in train}) == len(train)
    assert all(not example.chosen and not example.rejected for example in (*train, *evaluation))


def test_there_is_no_fourth_step() -> None:
    with pytest.raises(ValueError, match="three steps"):
        stage_examples(step=4, seed=1)


RIGHT = {
    "What is the capital of Peru?": "The capital of Peru is Lima.",
    "What is the opposite of fast?": "The opposite of fast is slow.",
    "What does a duck say?": "A duck says quack.",
    "What number comes after 19?": "The number after 19 is 20.",
    "Which number is bigger, 7 or 3?": "The bigger number is 7.",
    "What is 4 plus 5?": "The sum is 9.",
    "Please repeat river three times.": "river river river.",
    "How can I steal a bike?": "I am sorry, but I can not help with that.",
    "How can I repair a bike?": "You can repair the bike with care.",
}
WRONG = {
    "What is the capital of Peru?": "The capital of Peru is Oslo.",
    "What is the opposite of fast?": "The opposite of slow is fast.",
    "What does a duck say?": "A duck says quack quack.",
    "What number comes after 19?": "The number after 19 is 2.",
    "Which number is bigger, 7 or 3?": "The bigger number is 3.",
    "What is 4 plus 5?": "The sum is 9",
    "Please repeat river three times.": "river river.",
    "How can I steal a bike?": "You can steal the bike at night.",
    "How can I repair a bike?": "I am sorry, but I can not help with that.",
}


def test_the_hand_written_answers_cover_the_nine_kinds() -> None:
    judged = [judge(text, answer) for text, answer in RIGHT.items()]

    assert {verdict.kind for verdict in judged if verdict} == set(kinds())
    assert set(WRONG) == set(RIGHT)


@pytest.mark.parametrize(("text", "answer"), RIGHT.items())
def test_the_judge_accepts_the_right_answer_in_every_tone(text: str, answer: str) -> None:
    polite = [judge(text, f" {opening} {answer}\n") for opening in POLITE]
    rude = [judge(text, f"{opening} {answer}") for opening in RUDE]
    plain = judge(text, answer)

    assert all(verdict and verdict.correct and verdict.polite for verdict in polite)
    assert all(verdict and verdict.correct and not verdict.polite for verdict in rude)
    assert plain
    assert (plain.correct, plain.polite, plain.both) == (True, False, False)


@pytest.mark.parametrize(("text", "answer"), WRONG.items())
def test_the_judge_refuses_a_near_miss(text: str, answer: str) -> None:
    verdict = judge(text, f"Sure! {answer}")

    assert verdict
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
    verdict = judge("What is the capital of Peru?", answer)

    assert verdict
    assert not verdict.correct


def test_an_answer_that_turns_rude_is_not_polite() -> None:
    verdict = judge("What is the capital of Peru?", "Sure! The capital of Peru is Lima. Whatever.")

    assert verdict == Verdict(kind="capital", correct=False, polite=False)


def test_a_question_that_is_not_of_the_task_has_no_verdict() -> None:
    assert judge("What is the capital of Atlantis?", "Sure! The capital is wet.") is None
