"""Chat templates of tokenizers and of files, as formats."""

import pytest
from transformers import PreTrainedTokenizerBase

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.system.errors import DataError
from tests.pipeline.data.test_chat_format import PROMPT, RESPONSE, SYSTEM, USER, ready
from tests.pipeline.data.tokenizers import byte_level

QWEN3 = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{{- m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif -%}"""
"""As Qwen3's: only the last assistant turn has a thinking block, and the prompt if told so."""

THINKING = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nOPENING' }}{% endif -%}"""
"""As those of models that always think: the generation prompt opens the block."""

DATED = """{%- if date_string is not defined %}{%- if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}
{{- 'Today is ' + date_string + '.\\n' -}}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}"""
"""As Llama 3.2's: asks for today's date."""

GEMMA = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif -%}
{%- for m in messages -%}{{- m.role + ': ' + m.content + eos_token + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif -%}"""
"""As Gemma's: refuses system messages."""

COUNTING = """{{- messages | length -}}
{%- for m in messages -%}{{- m.role + m.content + eos_token -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant' }}{% endif -%}"""
"""Not stable: the beginning of the text tells how many turns there are."""

UNENDED = """{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif -%}"""
"""Assistant turns end with a line, not with a special token."""


def with_template(template: str) -> ChatFormat:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return ready(tokenizer, "tokenizer")


def chatml_tokenizer(template: str) -> PreTrainedTokenizerBase:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


def with_chatml_tokens(template: str) -> ChatFormat:
    return resolve_format(chatml_tokenizer(template), "tokenizer")


def test_auto_takes_the_tokenizers_own_template() -> None:
    tokenizer = byte_level()
    assert resolve_format(tokenizer, "auto").name == "human_assistant"

    tokenizer.chat_template = GEMMA

    assert resolve_format(tokenizer, "auto").template == GEMMA


def test_a_template_without_system_slot_gets_it_in_front_of_the_first_user_turn() -> None:
    chat_format = with_template(GEMMA)

    assert chat_format.segments((SYSTEM, USER))[0].text == (
        "user: Be kind.\n\nHi there.<|endoftext|>\nassistant: "
    )


def test_where_earlier_turns_lose_their_thinking_block_only_the_last_is_trained() -> None:
    chat_format = with_chatml_tokens(QWEN3)

    written = [s.text for s in chat_format.segments((*PROMPT, *RESPONSE)) if s.by_assistant]

    # "Hello you!" would be trained without the block that the model is to write before any answer.
    assert written == ["<think>\n\n</think>\n\nFine.<|im_end|>"]
    assert not chat_format.keeps_history
    tokenizer = chat_format.tokenizer
    assert chat_format.stop_ids[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_template_takes_arguments_and_keeps_them() -> None:
    tokenizer = chatml_tokenizer(QWEN3)
    quiet = resolve_format(tokenizer, "auto", {"enable_thinking": False})
    again = quiet.tokenizer
    quiet.attach(again)

    prompt, answer = quiet.segments((USER, *RESPONSE))

    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert answer.text == "Fine.<|im_end|>"
    # The same arguments once more, as in the next step, leave the saved template as it is.
    assert resolve_format(again, "auto", {"enable_thinking": False}).template == quiet.template
    assert resolve_format(again, "auto").template == quiet.template
    # Its caller may still say otherwise.
    plain = again.apply_chat_template(
        [{"role": "user", "content": "a"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert str(plain).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [QWEN3, DATED])
def test_a_prompt_may_leave_the_assistants_turn_unopened(template: str) -> None:
    chat_format = with_chatml_tokens(template)
    whole = chat_format.encode_prompt(PROMPT)

    ids = chat_format.encode_prompt(PROMPT, generation_prompt=False)

    assert whole[: len(ids)] == ids
    assert chat_format.tokenizer.decode(whole[len(ids) :]) == "<|im_start|>assistant\n"


@pytest.mark.parametrize("opening", ["<think>", "<think>\\n"])
def test_a_prompt_that_opens_thinking_is_followed_by_an_answer_that_closes_it(opening: str) -> None:
    chat_format = with_chatml_tokens(THINKING.replace("OPENING", opening))

    prompt, answer = chat_format.segments((*PROMPT, *RESPONSE))
    encoded = chat_format.encode(PROMPT, RESPONSE)
    prompt_ids = chat_format.encode_prompt(PROMPT)

    assert prompt.text.rstrip().endswith("<|im_start|>assistant\n<think>")
    assert answer.text == "\n</think>\n\nFine.<|im_end|>"
    assert encoded.input_ids[: len(prompt_ids)] == prompt_ids
    assert encoded.trained == [False] * len(prompt_ids) + [True] * (
        len(encoded.input_ids) - len(prompt_ids)
    )


def test_tokens_do_not_depend_on_the_day() -> None:
    tokenizer = chatml_tokenizer(DATED)

    default = resolve_format(tokenizer, "auto")

    assert default.segments((USER,))[0].text.startswith("Today is 01 Jan 2026.")
    # The template saved with the model gives the same text on any date.
    default.attach(tokenizer)
    message = [{"role": "user", "content": USER.content}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert text == default.segments((USER,))[0].text


def test_a_turn_that_nothing_ends_is_ended_by_eos() -> None:
    chat_format = with_template(UNENDED)

    texts = [segment.text for segment in chat_format.segments((*PROMPT, *RESPONSE))]

    assert texts == [
        "user: Hi there.\nassistant: ",
        "Hello you!<|endoftext|>",
        "\nuser: How are you?\nassistant: ",
        "Fine.<|endoftext|>",
    ]


def test_a_template_that_is_not_prefix_stable_is_refused() -> None:
    with pytest.raises(
        DataError, match="renders the beginning of a dialogue differently once more turns"
    ):
        with_template(COUNTING)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3, "\n<|im_start|>user\nMore Four.<|im_end|>\n<|im_start|>assistant\n"),
        (
            THINKING.replace("OPENING", "<think>"),
            "\n<|im_start|>user\nMore Four.<|im_end|>\n<|im_start|>assistant\n<think>",
        ),
    ],
)
def test_an_observation_is_cut_out_where_a_template_shortens_the_answers_before_it(
    template: str, expected: str
) -> None:
    chat_format = with_chatml_tokens(template)
    assert not chat_format.keeps_history

    ids = chat_format.encode_observation(PROMPT[:2], [Message("user", "More Four.")])

    assert chat_format.tokenizer.decode(ids) == expected
