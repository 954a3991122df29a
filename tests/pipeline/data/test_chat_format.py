from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.data.chat_format import FORMATS, ChatFormat
from pipeline.data.examples import Encoded, Message
from pipeline.data.resolve_format import resolve_format
from pipeline.errors import ConfigError, DataError, ModelError
from tests.pipeline.data.tokenizers import KINDS, byte_level, metaspace, prepending

USER, REPLY, AGAIN = (
    Message("user", "Hi there."),
    Message("assistant", "Hello you!"),
    "How are you?",
)
PROMPT = (USER, REPLY, Message("user", AGAIN))
RESPONSE = (Message("assistant", "Fine."),)
SYSTEM = Message("system", "Be kind.")

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


def ready(tokenizer: PreTrainedTokenizerBase, name: str) -> ChatFormat:
    chat_format = resolve_format(tokenizer, name)
    chat_format.add_new_tokens()
    return chat_format


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


def trained_text(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> str:
    kept = zip(encoded.input_ids, encoded.trained, strict=True)
    return tokenizer.decode([token for token, trained in kept if trained])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_same_tokens_in_training_and_in_generation(kind: str, name: str) -> None:
    chat_format = ready(KINDS[kind](), name)

    prompt_ids = chat_format.encode_prompt(PROMPT)
    encoded = chat_format.encode(PROMPT, RESPONSE)

    assert encoded.input_ids[: len(prompt_ids)] == prompt_ids
    assert not any(encoded.trained[: len(chat_format.encode_prompt(PROMPT[:1]))])
    assert all(encoded.trained[len(prompt_ids) :])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_prompt_has_the_tokens_that_plain_transformers_gives(
    kind: str, name: str, tmp_path: Path
) -> None:
    tokenizer = KINDS[kind]()
    chat_format = ready(tokenizer, name)
    chat_format.attach(tokenizer)
    tokenizer.save_pretrained(tmp_path)

    plain = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": USER.content}], add_generation_prompt=True, return_dict=False
    )

    assert plain == chat_format.encode_prompt((USER,))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_brings_no_spaces_into_the_turns(kind: str, name: str) -> None:
    tokenizer = KINDS[kind]()
    chat_format = ready(tokenizer, name)
    segments = chat_format.segments((*PROMPT, *RESPONSE))
    start = len(chat_format.encode_prompt(PROMPT[:1]))

    encoded = chat_format.encode(PROMPT, RESPONSE)

    later = "".join(segment.text for segment in segments[1:])
    assert tokenizer.decode(encoded.input_ids).endswith(later)
    # Decoded by themselves, sentencepiece tokens lose the space they begin with.
    assert tokenizer.decode(encoded.input_ids[start:]).lstrip() == later.lstrip()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_assistant_turn_is_trained_up_to_a_stop_token(kind: str, name: str) -> None:
    tokenizer = KINDS[kind]()
    chat_format = ready(tokenizer, name)

    encoded = chat_format.encode(PROMPT, RESPONSE)

    ends = [
        token
        for token, trained, after in zip(
            encoded.input_ids, encoded.trained, [*encoded.trained[1:], False], strict=True
        )
        if trained and not after
    ]
    assert len(ends) == 2
    assert set(ends) <= set(chat_format.stop_ids)
    assert encoded.input_ids[-1] in chat_format.stop_ids
    text = trained_text(tokenizer, encoded)
    assert "Hello you!" in text
    assert "Fine." in text
    assert "How" not in text
    assert "\n" not in text


@pytest.mark.parametrize("name", FORMATS)
def test_bos_stands_once_at_the_start_if_the_tokenizer_adds_one(name: str) -> None:
    tokenizer = byte_level(bos=True)
    chat_format = ready(tokenizer, name)

    ids = chat_format.encode(PROMPT[:1], RESPONSE).input_ids

    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"llama2"}))
def test_no_bos_is_written_where_the_tokenizer_adds_none(name: str) -> None:
    tokenizer = byte_level()
    tokenizer.bos_token = "<s>"

    ids = ready(tokenizer, name).encode(PROMPT, RESPONSE).input_ids

    assert tokenizer.bos_token_id not in ids


@pytest.mark.parametrize("bos", [False, True])
def test_a_saved_format_reads_back_as_the_same_format(*, bos: bool, tmp_path: Path) -> None:
    for name in FORMATS:
        tokenizer = byte_level(bos=bos)
        chat_format = ready(tokenizer, name)
        chat_format.attach(tokenizer)
        tokenizer.save_pretrained(tmp_path / name)

        again = resolve_format(AutoTokenizer.from_pretrained(tmp_path / name), "auto")

        assert again.template == chat_format.template
        assert again.new_tokens == ()
        assert again.stop_ids == chat_format.stop_ids
        assert again.encode(PROMPT, RESPONSE) == chat_format.encode(PROMPT, RESPONSE)


def test_human_assistant_reads_as_hh_rlhf_does() -> None:
    chat_format = resolve_format(byte_level(), "human_assistant")

    text = "".join(segment.text for segment in chat_format.segments((SYSTEM, *PROMPT, *RESPONSE)))

    assert text == (
        "Be kind.\n\nHuman: Hi there.\n\nAssistant: Hello you!<|endoftext|>"
        "\n\nHuman: How are you?\n\nAssistant: Fine.<|endoftext|>"
    )


def test_llama2_reads_as_llama2_does() -> None:
    chat_format = resolve_format(metaspace(), "llama2")

    text = "".join(segment.text for segment in chat_format.segments((SYSTEM, *PROMPT, *RESPONSE)))

    assert text == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi there. [/INST] Hello you! </s>"
        "<s>[INST] How are you? [/INST] Fine. </s>"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_system_message_is_never_lost(name: str) -> None:
    segments = resolve_format(byte_level(), name).segments((SYSTEM, *PROMPT))

    assert segments[0].text.index("Be kind.") < segments[0].text.index("Hi there.")


def test_plain_is_the_texts_and_the_end() -> None:
    tokenizer = byte_level()
    chat_format = resolve_format(tokenizer, "plain")

    encoded = chat_format.encode((Message("user", "1 + 1 = "),), (Message("assistant", "2"),))

    assert tokenizer.decode(encoded.input_ids) == "1 + 1 = 2<|endoftext|>"
    assert trained_text(tokenizer, encoded) == "2<|endoftext|>"


def test_text_that_answers_nobody_has_no_roles() -> None:
    tokenizer = metaspace()
    chat_format = ready(tokenizer, "chatml")

    encoded = chat_format.encode((), (Message("assistant", "Hello you"),))

    assert encoded.input_ids == [*tokenizer("Hello you").input_ids, tokenizer.eos_token_id]
    assert encoded.trained == [False] + [True] * (len(encoded) - 1)


def test_train_on_all_trains_everything_but_the_first_token() -> None:
    encoded = resolve_format(byte_level(), "vicuna").encode(PROMPT, RESPONSE, train_on="all")

    assert encoded.trained == [False] + [True] * (len(encoded) - 1)


def test_pad_that_is_eos_is_trained_where_it_ends_a_turn() -> None:
    tokenizer = byte_level()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id

    encoded = resolve_format(tokenizer, "human_assistant").encode(PROMPT, RESPONSE)

    at_eos = [
        trained
        for token, trained in zip(encoded.input_ids, encoded.trained, strict=True)
        if token == tokenizer.pad_token_id
    ]
    assert at_eos == [True, True]


def test_new_tokens_must_be_added_before_encoding() -> None:
    tokenizer = prepending()
    size = len(tokenizer)
    chat_format = resolve_format(tokenizer, "chatml")
    assert chat_format.new_tokens == ("<|im_start|>", "<|im_end|>")
    with pytest.raises(ModelError, match=r"needs the tokens <\|im_start\|> <\|im_end\|>"):
        chat_format.encode_prompt(PROMPT)

    assert chat_format.add_new_tokens() == 2

    assert chat_format.new_tokens == ()
    assert len(tokenizer) == size + 2
    assert chat_format.stop_ids == (size + 1, tokenizer.eos_token_id)
    assert {size, size + 1} <= set(chat_format.encode(PROMPT, RESPONSE).input_ids)


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


def test_an_argument_that_the_template_never_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.template_args enable_thinkng: the chat template"):
        resolve_format(chatml_tokenizer(QWEN3), "auto", {"enable_thinkng": False})


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

    default, said = (
        resolve_format(tokenizer, "auto"),
        resolve_format(tokenizer, "auto", date="2024-07-26"),
    )

    assert default.segments((USER,))[0].text.startswith("Today is 01 Jan 2026.")
    assert said.segments((USER,))[0].text.startswith("Today is 26 Jul 2024.")
    # What is saved with the model says so too, on every day.
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


def test_a_template_that_loses_text_is_refused() -> None:
    in_parts = GEMMA.replace("m.content", "m.content | selectattr('text') | join")

    with pytest.raises(DataError, match="leaves out the text of turns"):
        with_template(in_parts)


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        (None, ConfigError, "--format .*my.jinja is neither a Jinja file nor one of auto"),
        ("{% for %}", ConfigError, "my.jinja: line 1 of the template"),
        ("{{ messages[0].nothing.at_all }}", DataError, "can't render a dialogue of"),
    ],
)
def test_a_bad_jinja_file_is_one_sentence(
    content: str | None, error: type[Exception], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "my.jinja"
    if content is not None:
        path.write_text(content)

    with pytest.raises(error, match=sentence):
        resolve_format(byte_level(), str(path))


def test_a_jinja_file_is_a_format(tmp_path: Path) -> None:
    path = tmp_path / "my.jinja"
    path.write_text(GEMMA)

    assert resolve_format(byte_level(), str(path)).template == GEMMA


def test_formats_that_need_what_the_tokenizer_lacks_are_refused() -> None:
    with pytest.raises(ModelError, match="the tokenizer has no chat template"):
        resolve_format(byte_level(), "tokenizer")
    tokenizer = byte_level()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        resolve_format(tokenizer, "plain")


def refused(encode: Callable[[ChatFormat], object]) -> str:
    with pytest.raises(DataError) as raised:
        encode(resolve_format(byte_level(), "vicuna"))
    return str(raised.value)


def test_a_dialogue_that_ends_on_the_wrong_side_is_refused() -> None:
    assert refused(lambda f: f.encode_prompt((USER, REPLY))) == "a prompt must end in a user turn"
    assert "must end in an assistant turn" in refused(lambda f: f.encode((USER,), ()))


def test_a_turn_of_weight_0_is_read_and_not_trained() -> None:
    tokenizer = byte_level()
    chat = resolve_format(tokenizer, "human_assistant")
    prompt = (USER, Message("assistant", "Hello you!", trained=False), Message("user", "How?"))

    encoded = chat.encode(prompt, (Message("assistant", "Fine."),))
    whole = chat.encode(prompt, (Message("assistant", "Fine."),), train_on="all")

    pairs = zip(encoded.input_ids, encoded.trained, strict=True)
    assert tokenizer.decode([token for token, trained in pairs if trained]) == (
        f" Fine.{tokenizer.eos_token}"
    )
    assert "Hello you!" in tokenizer.decode(encoded.input_ids)
    left_out = [i for i, t in zip(whole.input_ids, whole.trained, strict=True) if not t]
    assert "Hello you!" in tokenizer.decode(left_out)
