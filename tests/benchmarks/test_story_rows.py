"""Rows of stories, the rule on how they end, and the template in which they go on."""

from types import SimpleNamespace

import pytest

from benchmarks.story_rows import borders, split
from benchmarks.story_rule import ends_well, keeps_rule, sentences_of
from pipeline.data.examples import Message
from pipeline.data.resolve_format import resolve_format
from tests.pipeline.data.tokenizers import byte_level, stories
from tests.test_documented_commands import ROOT

STORY = 'Tim had a cat. It ran.\nTim was sad! "Where is it?" he said. They were happy. The end.'


def test_a_story_is_cut_into_two_sentences_and_the_three_that_follow() -> None:
    assert split(byte_level(), STORY) == {
        "prompt": "Tim had a cat. It ran.",
        "response": 'Tim was sad! "Where is it?" he said.',
    }


@pytest.mark.parametrize(
    "story", ["One. Two. Three. Four. Fi", "1. 2. 3. 4. " + "long " * 96 + "."]
)
def test_a_story_that_is_too_short_or_goes_on_for_too_long_gives_no_row(story: str) -> None:
    assert split(byte_level(), story) is None


def test_a_sentence_ends_with_the_quotation_mark_that_closes_it() -> None:
    assert sentences_of('"Go!" he said. "No." The') == ['"Go!"', " he said.", ' "No."']


@pytest.mark.parametrize(
    ("response", "keeps"),
    [
        ("He ran. They were happy.", True),
        ('He ran. "We are friends!"', True),
        ("They were happy. He ran.", False),
        ("He ran. They were happy", False),
        ("He was unhappy.", False),
        ("", False),
    ],
)
def test_the_rule_asks_for_a_happy_word_in_a_last_sentence_that_is_whole(
    response: str, keeps: bool
) -> None:
    assert keeps_rule(response) is keeps


def test_a_response_that_was_cut_off_has_no_reward() -> None:
    episodes = [SimpleNamespace(response="All smiled.", stopped=each) for each in (True, False)]

    assert ends_well(episodes) == [1.0, 0.0]


def test_a_story_in_its_template_has_the_tokens_of_a_text_that_goes_on() -> None:
    tokenizer = stories()
    chat = resolve_format(tokenizer, str(ROOT / "benchmarks" / "story.jinja"))
    prompt, response = [Message("user", "Tim ran.")], [Message("assistant", "He was happy.")]
    begin, ends = borders(tokenizer)

    encoded = chat.encode(prompt, response)

    text = tokenizer("Tim ran. He was happy.", add_special_tokens=False)["input_ids"]
    assert encoded.input_ids == [begin, *text, tokenizer.bos_token_id]
    assert chat.encode_prompt(prompt) == encoded.input_ids[: encoded.trained.index(True)]
    assert set(chat.stop_ids) == set(ends)
