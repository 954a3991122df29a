"""The embedded model, untrained: its responses are noise, but fast."""

from collections.abc import Callable

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.conversation import Conversation
from inference.settings import Sampling
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.models.hf.load import load_for_inference
from tests.families import save_to, tiny_causal_lm


@pytest.fixture(scope="session")
def embedded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_for_inference("embedded")


@pytest.fixture
def make_conversation(
    embedded: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> Callable[..., Conversation]:
    """A factory of conversations with the embedded model."""

    def make(**sampling: int | float) -> Conversation:
        settings = Sampling(**{"max_new_tokens": 12, "seed": 1, **sampling})
        model, tokenizer = embedded
        return Conversation(model, tokenizer, resolve_format(tokenizer, "auto"), settings)

    return make


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_to(tiny_causal_lm("llama"), tmp_path_factory.mktemp("llama"))
