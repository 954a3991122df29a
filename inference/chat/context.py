"""What fits into a model's context."""

from collections.abc import Callable, Sequence

from pipeline.data.examples import Message
from pipeline.errors import DataError


def fit_turns(
    messages: Sequence[Message],
    encode: Callable[[Sequence[Message]], list[int]],
    max_tokens: int,
) -> tuple[list[int], int]:
    """Leave out the oldest turns until the rest has at most `max_tokens` tokens.

    A turn goes as a whole, the user's message with its answer; the system message stays.

    Returns:
        (token ids, number of messages left out).

    Raises:
        DataError: the newest message alone is too long.
    """
    system = list(messages[:1]) if messages and messages[0].role == "system" else []
    turns = list(messages[len(system) :])
    num_tokens = 0
    for start, message in enumerate(turns):
        if message.role != "user":
            continue
        token_ids = encode([*system, *turns[start:]])
        num_tokens = len(token_ids)
        if num_tokens <= max_tokens:
            return token_ids, start
    raise DataError(
        f"the message has {num_tokens} tokens, and {max_tokens} fit beside an answer"
        " in the model's context; shorten it"
    )
