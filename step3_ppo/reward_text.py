"""Reading by text: a reward model that has a tokenizer and a chat template of its own."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from inference.generation import Response
from pipeline.config import FrozenModelConfig
from pipeline.data.chat.chat_format import ChatFormat, Messages
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Encoded, Message
from pipeline.models.chat import decode_response, speaks_alike
from pipeline.models.load import load_tokenizer
from step3_ppo.episodes import EpisodeResponse
from step3_ppo.prompts import Prompt


class RewardText:
    """Turns the actor's tokens into the tokens that the reward model reads, by way of the text.

    A prompt is the dialogue it was made from, so that no text is lost on the way; the response is
    decoded. Both are rendered by the reward model's own chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, *, max_tokens: int
    ) -> None:
        self.tokenizer = tokenizer
        """The actor's."""
        self.chat = chat
        """The reward model's."""
        self.max_tokens = max_tokens
        """What the reward model reads; longer dialogues lose their beginning."""
        self._dialogues: dict[tuple[int, ...], Messages] = {}

    def know(self, prompts: Iterable[Prompt]) -> None:
        """Remember the dialogues behind prompts, which are handed around as the actor's tokens."""
        self._dialogues |= {tuple(each.input_ids): each.messages for each in prompts}

    def encode(self, prompt: Sequence[int], response: Response) -> Encoded:
        """What the reward model reads of a response; without an end where the response has none."""
        if isinstance(response, EpisodeResponse):
            *before, answer = (*response.opening, *response.turns)
        else:
            before = self._dialogues[tuple(prompt)]
            answer = Message("assistant", decode_response(self.tokenizer, response.ids))
        whole = self.chat.encode(before, [answer])
        if not response.stopped and whole.input_ids[-1] in self.chat.stop_ids:
            whole = whole.head(len(whole) - 1)
        return whole.tail(self.max_tokens, keep_first=self.chat.begins_with_cls)


def text_format(tokenizer: PreTrainedTokenizerBase, reward: FrozenModelConfig) -> ChatFormat | None:
    """The chat format of a reward model that reads text; None where it reads the actor's tokens.

    Raises:
        ModelError: it has another tokenizer and no chat template.
    """
    own = load_tokenizer(reward)
    if speaks_alike(tokenizer, own, str(reward.path)):
        return None
    return resolve_format(own, "auto")
