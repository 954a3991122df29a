"""Chat template arguments that a request may pass."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.serve.models import ModelPath
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from tests.families import saved, tiny_causal_lm
from tests.inference.serve.serving import CHAT, Answer, Running, post, serving
from tests.pipeline.data.chat.test_templates import QWEN3, chatml_tokenizer

USER = {"role": "user", "content": "Hi."}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model whose template reads enable_thinking."""
    path: Path = tmp_path_factory.mktemp("thinker")
    tokenizer = chatml_tokenizer(QWEN3)
    tokenizer.save_pretrained(path)
    model = tiny_causal_lm("llama", vocab_size=len(tokenizer), max_position_embeddings=128)
    with serving((ModelPath("thinker", saved(model, path)),)) as running:
        yield running


def ask(server: Running, *messages: dict[str, str], **fields: Any) -> Answer:
    body = {"messages": list(messages), "max_tokens": 1, **fields}
    return post(server, CHAT, body)


def prompted(server: Running, *messages: dict[str, str], **fields: Any) -> str:
    """The text of the prompt; as many tokens are read before a response."""
    tokens = post(server, "/tokenize", {"messages": list(messages), **fields}).json["tokens"]
    own = ask(server, *messages, **fields)
    assert own.json["usage"]["prompt_tokens"] == len(tokens), own.json
    return str(server.state.models["thinker"].tokenizer.decode(tokens))


def test_arguments_reach_the_template_as_those_of_training_do(thinker: Running) -> None:
    served = thinker.state.models["thinker"]
    trained = resolve_format(served.tokenizer, "auto", {"enable_thinking": False})
    expected = trained.encode_prompt([Message("user", "Hi.")])

    text = prompted(thinker, USER, chat_template_kwargs={"enable_thinking": False})

    assert text == served.tokenizer.decode(expected)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompted(thinker, USER).endswith("<|im_start|>assistant\n")
    assert prompted(thinker, USER, chat_template_kwargs={}) == prompted(thinker, USER)
