"""Chat template arguments in requests."""

from collections.abc import Iterator
from typing import Any

import pytest

from inference.serve.models import ModelPath
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from tests.families import save_base
from tests.inference.serve.serving import CHAT, LiveServer, post, serving
from tests.pipeline.data.chat.test_templates import QWEN3, chatml_tokenizer

USER = {"role": "user", "content": "Hi."}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a model whose template has the argument enable_thinking."""
    path, tokenizer = tmp_path_factory.mktemp("thinker"), chatml_tokenizer(QWEN3)
    save_base(path, tokenizer=tokenizer, max_position_embeddings=128)
    with serving((ModelPath("thinker", str(path)),)) as running:
        yield running


def prompt_text(server: LiveServer, *messages: dict[str, str], **fields: Any) -> str:
    """Return the prompt's text; a completion must count the same number of prompt tokens."""
    body = {"messages": list(messages), **fields}
    tokens = post(server, "/tokenize", body).json["tokens"]
    response = post(server, CHAT, {**body, "max_tokens": 1})
    assert response.json["usage"]["prompt_tokens"] == len(tokens), response.json
    return str(server.state.models["thinker"].tokenizer.decode(tokens))


def test_template_arguments_match_those_of_training(thinker: LiveServer) -> None:
    served = thinker.state.models["thinker"]
    trained = resolve_format(served.tokenizer, "auto", {"enable_thinking": False})
    expected = trained.encode_prompt([Message("user", "Hi.")])

    text = prompt_text(thinker, USER, chat_template_kwargs={"enable_thinking": False})

    assert text == served.tokenizer.decode(expected)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt_text(thinker, USER).endswith("<|im_start|>assistant\n")
    assert prompt_text(thinker, USER, chat_template_kwargs={}) == prompt_text(thinker, USER)
