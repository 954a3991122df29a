"""A dialogue with a model."""

from collections.abc import Callable

from inference.conversation import Conversation
from inference.generation import generate
from pipeline.data.examples import Message
from pipeline.models.forward.forward import context_length

Converse = Callable[..., Conversation]


def test_streamed_pieces_join_to_the_generated_response(make_conversation: Converse) -> None:
    conversation = make_conversation(temperature=0.0)
    conversation.messages = [Message("user", "Hi"), Message("assistant", "Hello.")]
    pieces: list[str] = []

    conversation.respond("What is 3 plus 4?", pieces.append)

    dialogue = [*conversation.messages[:2], Message("user", "What is 3 plus 4?")]
    (response,) = generate(
        conversation.model,
        [conversation.chat_format.encode_prompt(dialogue)],
        max_new_tokens=12,
        temperature=0.0,
        stop_ids=conversation.chat_format.stop_ids,
        seed=0,
    )
    text = conversation.tokenizer.decode(response.ids, skip_special_tokens=True)
    assert "".join(pieces) == text
    assert conversation.messages == [*dialogue, Message("assistant", text.strip())]


def test_long_dialogue_drops_its_oldest_turns(make_conversation: Converse) -> None:
    conversation = make_conversation(temperature=0.0, max_new_tokens=40)
    conversation.reset("Be brief.")
    assert context_length(conversation.model) == 256

    results = [conversation.respond("tell me " * 12, lambda _: None) for _ in range(6)]

    assert results[0].num_dropped == 0
    assert results[-1].num_dropped > 0
    assert results[-1].num_dropped % 2 == 0
    assert len(conversation.messages) == 13
    assert conversation.system == "Be brief."
