r"""Chat formats: from a dialogue to the token ids a model is trained on and prompted with.

A format is a Jinja template and the rule for cutting its text. The text is cut where the model's
part begins and ends, and each piece is tokenized separately:

    Human: Hi there.\n\nAssistant: | Hello!</s> | \n\nHuman: How are you?\n\nAssistant: | Fine.</s>

So the tokens of a prompt in training are the tokens of that prompt in generation, and what the
model generated keeps its tokens in the next turn. An assistant turn ends with the token that ends
generation. Loss masks follow from the cut, never from token ids, so a padding token that is also
the end-of-sequence token does no harm.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.data.examples import Encoded, Message
from pipeline.system.errors import ConfigError, DataError, ModelError
from pipeline.system.hub import cached_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Encoder = Callable[[str], list[int]]


def beginning_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Return the encoder of texts without added special tokens."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def continuation_encoder(tokenizer: "PreTrainedTokenizerBase") -> Encoder:
    """Token ids of a text that follows another text: like `tokenizer`, with no dummy prefix.

    The encoder is a copy: tokens added to `tokenizer` later are unknown to it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return beginning_encoder(tokenizer)
    state = json.loads(backend.to_str())
    bare = {
        **state,
        "truncation": None,
        "padding": None,
        "normalizer": _without_prefix(state["normalizer"]),
        "pre_tokenizer": _without_prefix(state["pre_tokenizer"]),
    }
    if (bare["normalizer"], bare["pre_tokenizer"]) == (
        state["normalizer"],
        state["pre_tokenizer"],
    ):
        return beginning_encoder(tokenizer)
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(json.dumps(bare))
    return lambda text: copy.encode(text, add_special_tokens=False).ids


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer of tokenizer.json, less what it does to the start of a text."""
    if part is None or part["type"] in ("Prepend", "Strip"):
        return None
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        kept = [bare for inner in part[name] if (bare := _without_prefix(inner)) is not None]
        return {**part, name: kept} if kept else None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part


Messages = Sequence[Message]

THINK = "<think>"
END_OF_THINK = "\n</think>\n\n"
"""How an answer without thinking closes the block that a generation prompt has opened: after
`<think>` and a line's end it is the empty block that models of the Qwen3 family were trained on."""

PROBE_PROMPT = (Message("user", "One?"), Message("assistant", "Two."), Message("user", "Three?"))
PROBE_RESPONSE = Message("assistant", "Four.")


@dataclass(frozen=True)
class Segment:
    """A piece of a dialogue's text that is tokenized separately."""

    text: str

    by_assistant: bool
    """The assistant wrote it, up to and including its end-of-turn token."""

    trained: bool = True
    """False if the data marks the turn as not learned."""


@dataclass(frozen=True)
class ChatFormat:
    """A chat template bound to a tokenizer."""

    name: str

    template: str
    """The Jinja text saved with the model: `apply_chat_template` renders what we train on."""

    tokenizer: "PreTrainedTokenizerBase"

    tokens: tuple[str, ...] = ()
    """The special tokens the template needs."""

    keeps_history: bool = True
    """A turn of the assistant is rendered alike as the last one and as an earlier one. If not, as
    where a template leaves the thinking of earlier turns out, only the last one is trained."""

    system_slot: bool = True
    """The template takes a system message; if not, it is put in front of the first user turn."""

    @property
    def new_tokens(self) -> tuple[str, ...]:
        """Special tokens that the template needs and the tokenizer lacks."""
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        return tuple(token for token in self.tokens if token not in added)

    def add_new_tokens(self) -> int:
        """Add `new_tokens` to the tokenizer; return how many.

        The model's embeddings must then have at least `len(tokenizer)` rows. This comes before the
        first dialogue is encoded.
        """
        return self.tokenizer.add_tokens(list(self.new_tokens), special_tokens=True)

    def attach(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Make this the chat template that is saved with `tokenizer`."""
        tokenizer.chat_template = self.template

    @property
    def title(self) -> str:
        """Title in messages: its name, or the model whose template it is."""
        owner = str(self.tokenizer.name_or_path or "")
        if self.name == "tokenizer" and owner:
            return f"the chat template of {owner}"
        return f"chat format {self.name}"

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: the format's end-of-turn token, then `end_ids`."""
        self._require_tokens()
        own = self.tokenizer.get_vocab()[self._end_of_turn]
        return tuple(dict.fromkeys((own, *end_ids(self.tokenizer))))

    @cached_property
    def begins_with_cls(self) -> bool:
        """Whether the first token of a text represents the text, as in encoders."""
        cls = self.tokenizer.cls_token_id
        return cls is not None and cls == self.tokenizer.bos_token_id and adds_bos(self.tokenizer)

    def render(self, messages: Messages, *, generation_prompt: bool) -> str:
        """The text of a dialogue, as `apply_chat_template` gives it."""
        import jinja2

        folded = messages if self.system_slot else _fold_system(messages)
        turns = [{"role": message.role, "content": message.content} for message in folded]
        try:
            text = self.tokenizer.apply_chat_template(
                turns,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.title}: line {error.lineno} of the template: {error.message}"
            ) from error
        except Exception as error:  # a template is a program, and may raise anything
            reason = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise DataError(
                f"{self.title} can't render a dialogue of"
                f" {', '.join(message.role for message in messages)} turns: {reason};"
                " fix the template, choose another --format, or leave such dialogues out"
            ) from error
        return str(text)

    def segments(self, messages: Messages) -> list[Segment]:
        """The text of a dialogue, cut where assistant turns begin and end.

        A dialogue that ends in a user turn ends with the generation prompt; one that ends in an
        assistant turn ends with that turn's last token.
        """
        answered = messages[-1].role == "assistant"
        if answered and len(messages) == 1:  # plain text has no roles
            return [Segment(self._bos + messages[0].content + self._eos, by_assistant=True)]
        text = self.render(messages, generation_prompt=not answered)
        turns = [at for at, message in enumerate(messages) if message.role == "assistant"]
        if not self.keeps_history:
            turns = turns[-1:] if answered else []
        if not self.keeps_history and answered:
            prompt = self.render(messages[:-1], generation_prompt=True)
            if prompt.rstrip().endswith(THINK) and not text.startswith(prompt):
                # The answer has no thinking and closes the block that its prompt opens.
                turn = END_OF_THINK.lstrip("\n") if prompt.endswith("\n\n") else END_OF_THINK
                turn += messages[-1].content.strip()
                return [
                    Segment(prompt, by_assistant=False),
                    self._closed(turn, trained=messages[-1].trained),
                ]
        starts = [self._start(messages[:at], text) for at in turns]
        segments: list[Segment] = []
        position = 0
        for at, start, limit in zip(turns, starts, [*starts, len(text)][1:], strict=True):
            region = text[start:limit]
            length = self._turn_length(messages[: at + 1], region)
            segments.append(Segment(text[position:start], by_assistant=False))
            segments.append(self._closed(region[:length], trained=messages[at].trained))
            position = start + length
        if not answered:
            segments.append(Segment(text[position:], by_assistant=False))
        return segments

    def _closed(self, turn: str, *, trained: bool) -> Segment:
        """An assistant turn, ended by its end-of-turn token."""
        end = "" if turn.endswith(self._end_of_turn) else self._end_of_turn
        return Segment(turn + end, by_assistant=True, trained=trained)

    def encode_prompt(self, messages: Messages, *, generation_prompt: bool = True) -> list[int]:
        """Token ids of a dialogue that the assistant is to continue.

        Args:
            messages: the dialogue, which ends in a user turn.
            generation_prompt: whether the beginning of the assistant's turn follows.

        Raises:
            DataError: the template can't render it.
        """
        if not messages or messages[-1].role == "assistant":
            raise DataError("a prompt must end in a user turn")
        segments = self.segments(messages)
        if not generation_prompt:
            text = self.render(messages, generation_prompt=False)
            full = self.render(messages, generation_prompt=True)
            opening, last = full[len(text) :], segments[-1].text
            if not (full.startswith(text) and last.endswith(opening)):
                raise DataError(
                    f"{self.title} renders a dialogue differently without its generation prompt;"
                    " request it with the prompt"
                )
            segments[-1] = Segment(last[: len(last) - len(opening)], by_assistant=False)
        return [token for ids in self._ids(segments) for token in ids]

    def encode(
        self,
        prompt: Messages,
        response: Messages,
        train_on: Literal["assistant", "all"] = "assistant",
    ) -> Encoded:
        """Token ids of a dialogue, which begin with `encode_prompt(prompt)`, and which are trained.

        Trained are the texts of all assistant turns and the tokens that end them; with "all",
        every token. Turns that are not `trained`, and the first token, never are.
        """
        messages = [*prompt, *response]
        if not response or messages[-1].role != "assistant":
            raise DataError("a response must end in an assistant turn")
        segments = self.segments(messages)
        input_ids: list[int] = []
        trained: list[bool] = []
        for segment, ids in zip(segments, self._ids(segments), strict=True):
            input_ids += ids
            learned = segment.trained and (segment.by_assistant or train_on == "all")
            trained += [learned] * len(ids)
        trained[0] = False
        return Encoded(input_ids, trained)

    def encode_observation(self, before: Messages, observation: Messages) -> list[int]:
        """Token ids of the turns that follow an answer, with the next generation prompt.

        They are appended to the ids that the model sampled, which are not encoded again: what
        stands between turns, and the observation, as the template has it after any answer.

        Args:
            before: the dialogue up to and including the answer; its texts count for nothing.
            observation: turns of the user or the system.

        Raises:
            DataError: the template can't render such a dialogue, or leaves out a turn of it.
        """
        # A fixed text stands for answers: any text must not move the cut.
        answer = PROBE_RESPONSE.content
        messages = [*before, *observation]
        while any(answer in turn.content for turn in messages if turn.role != "assistant"):
            answer += "."
        fixed = [
            Message("assistant", answer) if turn.role == "assistant" else turn for turn in messages
        ]
        text = self.render(fixed, generation_prompt=True).rpartition(answer)[2]
        for turn in observation:
            if turn.content.strip() not in text:
                raise DataError(
                    f"{self.title} leaves out the turn of the {turn.role} after an"
                    " answer; make it a part of the user's turn, or choose another --format"
                )
        closing, end, rest = text.partition(self._end_of_turn)
        return self._encoders[1](rest if end and not closing.strip() else text)

    def _ids(self, segments: Sequence[Segment]) -> list[list[int]]:
        begin, go_on = self._encoders
        return [begin(segments[0].text), *(go_on(segment.text) for segment in segments[1:])]

    def _start(self, before: Messages, text: str) -> int:
        """Return the offset in `text` of the assistant's turn after `before`."""
        prompt = self.render(before, generation_prompt=True)
        if not text.startswith(prompt):
            raise DataError(
                f"{self.title} renders the beginning of a dialogue differently once more"
                " turns follow, so a prompt would not be trained on as it is generated from; choose"
                " another --format"
            )
        return len(prompt)

    def _turn_length(self, messages: Messages, region: str) -> int:
        """Return the length of the last of `messages` in `region`, with its end of turn.

        Args:
            messages: a dialogue up to and including an assistant turn.
            region: the text from that turn on, up to the assistant turn after it.
        """
        content = messages[-1].content.strip()
        found = region.find(content)
        end = region.find(self._end_of_turn, found + len(content) if found >= 0 else 0)
        if end >= 0:
            return end + len(self._end_of_turn)
        # The template ends turns in the middle without a token.
        alone = self.render(messages, generation_prompt=False)
        start = self._start(messages[:-1], alone)
        turn = alone[start:].rstrip().removesuffix(self._end_of_turn).rstrip()
        if not region.startswith(turn):
            raise DataError(
                f"{self.title} changes the text of an assistant turn once more turns"
                " follow, so it can't be trained on as it is generated; choose another --format"
            )
        return len(turn)

    @cached_property
    def _encoders(self) -> tuple[Encoder, Encoder]:
        self._require_tokens()
        return beginning_encoder(self.tokenizer), continuation_encoder(self.tokenizer)

    def _require_tokens(self) -> None:
        if self.new_tokens:
            raise ModelError(
                f"{self.title} needs the tokens {' '.join(self.new_tokens)}, which the"
                " tokenizer lacks: they must be added, and the model's embeddings resized, first"
            )

    @cached_property
    def _end_of_turn(self) -> str:
        """The special token after an assistant turn's text; end-of-sequence where there is none."""
        dialogue = self.render((*PROBE_PROMPT, PROBE_RESPONSE), generation_prompt=False)
        tail = dialogue.rpartition(PROBE_RESPONSE.content)[2]
        specials = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        specials.update(self.tokenizer.all_special_tokens, self.tokens)
        found = [(tail.find(token), -len(token), token) for token in specials if token in tail]
        return min(found)[2] if found else self._eos

    @property
    def _eos(self) -> str:
        return str(self.tokenizer.eos_token)

    @property
    def _bos(self) -> str:
        return str(self.tokenizer.bos_token) if adds_bos(self.tokenizer) else ""


def _fold_system(messages: Messages) -> list[Message]:
    """The dialogue with system messages put in front of the user turn after them."""
    folded: list[Message] = []
    system: list[str] = []
    for message in messages:
        if message.role == "system":
            system.append(message.content)
        elif system and message.role == "user":
            folded.append(Message("user", "\n\n".join([*system, message.content])))
            system = []
        else:
            folded.append(message)
    return folded


def end_ids(tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Ids that end a text: end-of-sequence, then those at which plain `generate` stops.

    The latter are `eos_token_id` in the model's generation_config.json, or in its config.json.
    """
    ids, source = [tokenizer.eos_token_id], str(tokenizer.name_or_path)
    for name in ("generation_config.json", "config.json") if source else ():
        local = Path(source) / name
        if file := local if local.is_file() else cached_file(source, name):
            declared = json.loads(Path(file).read_text("utf-8")).get("eos_token_id")
            ids += declared if isinstance(declared, list) else [declared]
            break
    known = set(tokenizer.get_vocab().values())
    return tuple(dict.fromkeys(number for number in ids if number in known))


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the tokenizer adds a beginning-of-sequence token to a text."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
