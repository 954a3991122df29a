"""A dialogue with a model: its messages, and responses that come word by word."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.sampling import sampler_of
from inference.generation import generate_each
from inference.settings import Sampling
from inference.streaming import TextStream
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.examples import Message
from pipeline.errors import DataError
from pipeline.models.forward import context_length


@dataclass(frozen=True)
class Reply:
    """How a response came about; its text is the last of the messages."""

    text: str

    num_left_out: int
    """Messages that the model didn't see because they no longer fit its context."""

    interrupted: bool
    """Ctrl-C ended it."""


class Conversation:
    """Keeps a dialogue as messages and has the model continue it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        chat_format: ChatFormat,
        sampling: Sampling,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.chat_format = chat_format
        self.sampling = sampling
        self.messages: list[Message] = []
        self._num_responses = 0

    def reset(self, system: str | None = None) -> None:
        """Begin anew, with `system` as the system message if given."""
        self.messages = [Message("system", system)] if system else []

    @property
    def system(self) -> str | None:
        """The system message, if there is one."""
        has_system = self.messages and self.messages[0].role == "system"
        return self.messages[0].content if has_system else None

    def respond(self, text: str, write: Callable[[str], None]) -> Reply:
        """Reply to the user's `text`, handing pieces of the response to `write` as they come.

        KeyboardInterrupt ends the response; what was written until then stays in the dialogue.

        Raises:
            DataError: `text` alone does not fit the model's context; the dialogue is as before.
        """
        dialogue = [*self.messages, Message("user", text)]
        num_left_out = 0
        stream = TextStream(self.tokenizer)
        pieces: list[str] = []

        def emit(piece: str) -> None:
            if piece:
                pieces.append(piece)
                write(piece)

        def on_token(row: int, token_id: int) -> None:
            del row  # there is one
            if token_id not in self.chat_format.stop_ids:
                emit(stream.add(token_id))

        interrupted = False
        try:
            token_ids, num_left_out = self._encode(dialogue)
            sampling = replace(self.sampling, seed=self.sampling.seed + self._num_responses)
            list(
                generate_each(
                    self.model,
                    [token_ids],
                    sampler_of(sampling, self.chat_format.stop_ids),
                    max_new_tokens=self.sampling.max_new_tokens,
                    on_token=on_token,
                )
            )
            emit(stream.finish())
        except KeyboardInterrupt:
            interrupted = True
        self._num_responses += 1
        response = "".join(pieces).strip()
        self.messages = [*dialogue, Message("assistant", response)]
        return Reply(response, num_left_out, interrupted)

    def leave_unanswered(self, text: str) -> None:
        """Keep the user's `text` in the dialogue with an empty response."""
        self.messages = [*self.messages, Message("user", text), Message("assistant", "")]

    def _encode(self, dialogue: list[Message]) -> tuple[list[int], int]:
        """Token ids of the turns that fit the context, and how many messages do not."""
        limit = context_length(self.model)
        # At most half of the context is kept free for the response, so that some dialogue stays.
        room = limit - min(self.sampling.max_new_tokens, limit // 2)
        return fit_turns(dialogue, self.chat_format.encode_prompt, room)


def fit_turns(
    messages: Sequence[Message],
    encode: Callable[[Sequence[Message]], list[int]],
    max_tokens: int,
) -> tuple[list[int], int]:
    """Leave out the oldest turns until the rest has at most `max_tokens` tokens.

    A turn goes as a whole, the user's message with its response; the system message stays.

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
        f"the message has {num_tokens} tokens, and {max_tokens} fit beside a response"
        " in the model's context; shorten it"
    )
