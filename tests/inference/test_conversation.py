"""A dialogue with a model."""

from collections.abc import Callable

from inference.conversation import Conversation
from inference.generation import generate
from pipeline.data.examples import Message
from pipeline.models.forward.forward import context_length

Converse = Callable[..., Conversation]


def test_the_pieces_are_the_answer_that_generation_gives(converse: Converse) -> None:
    conversation = converse(temperature=0.0)
    conversation.messages = [Message("user", "Hi"), Message("assistant", "Hello.")]
    pieces: list[str] = []

    answer = conversation.respond("What is 3 plus 4?", pieces.append)

    dialogue = [*conversation.messages[:2], Message("user", "What is 3 plus 4?")]
    (response,) = generate(
        conversation.model,
        [conversation.chat_format.encode_prompt(dialogue)],
        max_new_tokens=12,
        temperature=0.0,
        stop_ids=conversation.chat_format.stop_ids,
        seed=0,
    )
    whole = conversation.tokenizer.decode(response.ids, skip_special_tokens=True)
    assert "".join(pieces) == whole
    assert answer.text == whole.strip()
    assert conversation.messages == [*dialogue, Message("assistant", answer.text)]


def test_a_dialogue_longer_than_the_context_goes_on_without_its_oldest_turns(
    converse: Converse,
) -> None:
    conversation = converse(temperature=0.0, max_new_tokens=40)
    conversation.reset("Be brief.")
    assert context_length(conversation.model) == 256

    answers = [conversation.respond("tell me " * 12, lambda _: None) for _ in range(6)]

    assert answers[0].num_left_out == 0
    assert answers[-1].num_left_out > 0
    assert answers[-1].num_left_out % 2 == 0
    assert len(conversation.messages) == 13
    assert conversation.system == "Be brief."
