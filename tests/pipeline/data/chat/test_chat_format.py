from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.chat.resolve_format import FORMATS, resolve_format
from pipeline.data.examples import Encoded, Message
from tests.pipeline.data.tokenizers import KINDS, byte_level, metaspace

USER, REPLY, FOLLOW_UP = (
    Message("user", "Hi there."),
    Message("assistant", "Hello you!"),
    "How are you?",
)
PAIRS = [
    (kind, name)
    for i, kind in enumerate(KINDS)
    for j, name in enumerate(FORMATS)
    if (i + j) % 4 == 0
]
PROMPT = (USER, REPLY, Message("user", FOLLOW_UP))
RESPONSE = (Message("assistant", "Fine."),)
SYSTEM = Message("system", "Be kind.")


def make_chat_format(tokenizer: PreTrainedTokenizerBase, name: str) -> ChatFormat:
    chat_format = resolve_format(tokenizer, name)
    chat_format.add_new_tokens()
    return chat_format


def decode_trained(tokenizer: PreTrainedTokenizerBase, encoded: Encoded) -> str:
    pairs = zip(encoded.input_ids, encoded.trained, strict=True)
    return tokenizer.decode([token for token, trained in pairs if trained])


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_prompt_tokens_are_equal_in_training_and_generation(kind: str, name: str) -> None:
    chat_format = make_chat_format(KINDS[kind](), name)

    prompt_ids = chat_format.encode_prompt(PROMPT)
    encoded = chat_format.encode(PROMPT, RESPONSE)

    assert encoded.input_ids[: len(prompt_ids)] == prompt_ids
    assert not any(encoded.trained[: len(chat_format.encode_prompt(PROMPT[:1]))])
    assert all(encoded.trained[len(prompt_ids) :])


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_prompt_tokens_match_plain_transformers(kind: str, name: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    chat_format = make_chat_format(tokenizer, name)
    chat_format.attach(tokenizer)
    tokenizer.save_pretrained(tmp_path)

    plain = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": USER.content}], add_generation_prompt=True, return_dict=False
    )

    assert plain == chat_format.encode_prompt((USER,))


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_observation_tokens_match_those_of_the_full_dialogue(kind: str, name: str) -> None:
    chat_format = make_chat_format(KINDS[kind](), name)
    answer = Message("assistant", "Any answer, even Four. or <s>")
    observation = Message("user", FOLLOW_UP + " Four.")
    full = chat_format.encode((USER, REPLY, observation), RESPONSE)
    prompt_ids, response = chat_format.encode_prompt((USER,)), chat_format.encode((USER,), (REPLY,))
    expected = full.input_ids[len(response) :]

    ids = chat_format.encode_observation((USER, answer), [observation])

    assert response.input_ids[: len(prompt_ids)] == prompt_ids
    assert ids == expected[: len(ids)]
    assert not any(full.trained[len(response) : len(response) + len(ids)])
    assert all(full.trained[len(response) + len(ids) :])


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_every_assistant_turn_is_trained_including_its_stop_token(kind: str, name: str) -> None:
    tokenizer = KINDS[kind]()
    chat_format = make_chat_format(tokenizer, name)

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
    text = decode_trained(tokenizer, encoded)
    assert "Hello you!" in text
    assert "Fine." in text
    assert "How" not in text
    assert "\n" not in text


@pytest.mark.parametrize("name", FORMATS)
def test_bos_occurs_once_at_the_start_if_the_tokenizer_adds_it(name: str) -> None:
    tokenizer = byte_level(bos=True)
    chat_format = make_chat_format(tokenizer, name)

    ids = chat_format.encode(PROMPT[:1], RESPONSE).input_ids

    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    ids = chat_format.encode((), (Message("assistant", "<s>Plain.<|endoftext|>\n"),)).input_ids
    assert tokenizer.decode(ids) == "<s>Plain.<|endoftext|>"


def test_template_may_begin_with_space_and_bos() -> None:  # as Falcon-H1's
    tokenizer = byte_level(bos=True)
    tokenizer.chat_template = " {{ bos_token }}" + FORMATS["human_assistant"]

    assert resolve_format(tokenizer, "auto").template == tokenizer.chat_template


@pytest.mark.parametrize("bos", [False, True])
def test_saved_format_is_restored_from_the_tokenizer(*, bos: bool, tmp_path: Path) -> None:
    for name in FORMATS:
        tokenizer = byte_level(bos=bos)
        chat_format = make_chat_format(tokenizer, name)
        chat_format.attach(tokenizer)
        tokenizer.save_pretrained(tmp_path / name)

        loaded = resolve_format(AutoTokenizer.from_pretrained(tmp_path / name), "auto")

        assert loaded.template == chat_format.template
        assert loaded.new_tokens == ()
        assert loaded.stop_ids == chat_format.stop_ids
        assert loaded.encode(PROMPT, RESPONSE) == chat_format.encode(PROMPT, RESPONSE)


def test_human_assistant_format_matches_hh_rlhf() -> None:
    chat_format = resolve_format(byte_level(), "human_assistant")

    text = "".join(segment.text for segment in chat_format.segments((SYSTEM, *PROMPT, *RESPONSE)))

    assert text == (
        "Be kind.\n\nHuman: Hi there.\n\nAssistant: Hello you!<|endoftext|>"
        "\n\nHuman: How are you?\n\nAssistant: Fine.<|endoftext|>"
    )


def test_llama2_format_matches_llama_2() -> None:
    chat_format = resolve_format(metaspace(), "llama2")

    text = "".join(segment.text for segment in chat_format.segments((SYSTEM, *PROMPT, *RESPONSE)))

    assert text == (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi there. [/INST] Hello you! </s>"
        "<s>[INST] How are you? [/INST] Fine. </s>"
    )


def test_untrained_turn_is_encoded_but_not_trained() -> None:
    tokenizer = byte_level()
    chat = resolve_format(tokenizer, "human_assistant")
    prompt = (USER, Message("assistant", "Hello you!", trained=False), Message("user", "How?"))

    encoded = chat.encode(prompt, (Message("assistant", "Fine."),))
    trained_on_all = chat.encode(prompt, (Message("assistant", "Fine."),), train_on="all")

    assert decode_trained(tokenizer, encoded) == f" Fine.{tokenizer.eos_token}"
    assert "Hello you!" in tokenizer.decode(encoded.input_ids)
    pairs = zip(trained_on_all.input_ids, trained_on_all.trained, strict=True)
    untrained_ids = [token for token, trained in pairs if not trained]
    assert "Hello you!" in tokenizer.decode(untrained_ids)
