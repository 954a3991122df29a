r"""Chat formats: convert a dialogue to the token ids that a model is trained on or prompted with.

A format is a Jinja template and a rule for splitting its text. The text is split where the model's
turns begin and end, and each segment is tokenized separately:

    Human: Hi there.\n\nAssistant: | Hello!</s> | \n\nHuman: How are you?\n\nAssistant: | Fine.</s>

So a prompt has the same tokens in training and generation, and generated tokens are unchanged in
the next turn. An assistant turn ends with the token that ends generation. Loss masks are computed
from segments, never from token ids, so a padding token may equal the end-of-sequence token.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeline.data.chat.encoders import (
    Encoder,
    adds_bos,
    beginning_encoder,
    continuation_encoder,
    end_ids,
)
from pipeline.data.examples import REASONING, Encoded, Message
from pipeline.system.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

Messages = Sequence[Message]

THINK, END_THINK = "<think>", "</think>"
CLOSE_THINK = "\n</think>\n\n"
"""Text with which an answer without thinking closes the block that a generation prompt opened.
After `<think>` and a newline, it completes the empty block that Qwen3 models were trained on."""

_OPENING_TAG = re.compile(r"<think>(?P<space>\s*)\Z")
_EMPTY_BLOCK = re.compile(r"\s*<think>\s*</think>")
_LEADING_BLOCK = re.compile(r"\A(\s*<think>(.*?</think>)?\n*|\s*</think>|\n*)", re.DOTALL)
_FILLED_BLOCK = re.compile(r"\s*(<think>)?\s*(?!</?think>)\S.*</think>", re.DOTALL)
_UNCLOSED_BLOCK = re.compile(r"\s*<think>(?!.*</think>)", re.DOTALL)
"""Patterns of thinking: an opening tag at the end of a prompt; at the beginning of a turn, an empty
block, any block or closing tag, a closed block with text, and a block that is never closed."""

UNSTABLE = (
    " when more turns follow, so prompts would differ between training and generation; choose"
    " another --format"
)
OMITS_TEXT = "omits part of the response, so the response is trained on as given in the row"
OMITS_TEXT_WITH_CALLS = "omits text or reasoning next to tool calls; that part is not trained on"
OMITS_REASONING = "does not support reasoning, which is omitted; put it into the content"
CHANGES_EARLIER_ANSWERS = (
    "renders an answer differently when more turns follow (for example, without thinking); only the"
    " last answer is trained on"
)

DUPLICATE_END_TOKEN = "adds the end token of a turn itself, so the one in the row's text is omitted"
RENDERED_PROMPT = (
    "adds its tokens to a prompt that already begins with such a token; if the rows were rendered"
    " with a template, choose --format plain"
)

PROBE_PROMPT = (Message("user", "One?"), Message("assistant", "Two."), Message("user", "Three?"))
PROBE_RESPONSE = Message("assistant", "Four.")

_ARGUMENTS = {"type": "object", "properties": {"six": {"type": "string", "description": "Six."}}}
_SCHEMA = {**_ARGUMENTS, "required": ["six"]}
_FUNCTION = {"name": "probefive", "description": "Five.", "parameters": _SCHEMA}
_PROBE_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {"name": "probefive", "arguments": {"six": "Seven."}}
_PROBE_KEYS = json.dumps(
    {"tool_calls": [{"id": "probefive", "type": "function", "function": _CALL}]}
)
PROBE_CALL = (
    Message("user", "One?"),
    Message("assistant", "", keys=_PROBE_KEYS),
    Message("tool", "Nine.", keys='{"name": "probefive", "tool_call_id": "probefive"}'),
)
MAX_RENDERED = 64
"""Maximum number of rendered dialogues that a chat format caches."""

NO_TOOLS = "; remove rows with tools, or choose another --format"


@dataclass(frozen=True)
class Segment:
    """A segment of a dialogue's text that is tokenized separately."""

    text: str

    by_assistant: bool
    """Whether the text is the assistant's: the response and its end-of-turn token."""

    trained: bool = True
    """False if the data marks the turn as not trained on."""


@dataclass(frozen=True)
class ChatFormat:
    """A chat template bound to a tokenizer."""

    name: str

    template: str
    """Jinja source, saved with the model so that `apply_chat_template` renders as in training."""

    tokenizer: "PreTrainedTokenizerBase"

    tokens: tuple[str, ...] = ()
    """The special tokens that the template needs."""

    system_slot: bool = True
    """Whether the template supports system messages; `_fold_system` replaces them otherwise."""

    _reported: set[str] = field(default_factory=set, compare=False, repr=False)
    """Warnings that were already logged; each is logged only once."""

    _rendered: dict[Any, str] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of `render`: the turns and responses of a row share most of their texts."""

    @property
    def new_tokens(self) -> tuple[str, ...]:
        """Special tokens that the template needs and the tokenizer lacks."""
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        return tuple(token for token in self.tokens if token not in added)

    def add_new_tokens(self) -> int:
        """Add `new_tokens` to the tokenizer; return their number.

        The model's embeddings must then have at least `len(tokenizer)` rows. Call this before the
        first dialogue is encoded.
        """
        return self.tokenizer.add_tokens(list(self.new_tokens), special_tokens=True)

    def attach(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Set this chat template on `tokenizer`, so that saving the tokenizer also saves it."""
        tokenizer.chat_template = self.template

    @property
    def title(self) -> str:
        """Name of the format in messages; for a tokenizer's own template, the model's name."""
        model_name = str(self.tokenizer.name_or_path or "")
        if self.name == "tokenizer" and model_name:
            return f"the chat template of {model_name}"
        return f"chat format {self.name}"

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: the format's end-of-turn token, then `end_ids`."""
        self._require_tokens()
        end_of_turn = self.tokenizer.get_vocab()[self._end_of_turn]
        return tuple(dict.fromkeys((end_of_turn, *end_ids(self.tokenizer))))

    @cached_property
    def begins_with_cls(self) -> bool:
        """Whether every text begins with a CLS token, which represents the text in encoders."""
        cls = self.tokenizer.cls_token_id
        return cls is not None and cls == self.tokenizer.bos_token_id and adds_bos(self.tokenizer)

    def render(self, messages: Messages, *, generation_prompt: bool) -> str:
        """Render the text of a dialogue, as `apply_chat_template` does.

        Raises:
            ConfigError: the template has a syntax error.
            DataError: the template can't render the dialogue, or ignores its tools.
        """
        tools = messages[0].tools
        if tools and not self._supports_tools:
            raise DataError(f"{self.title} ignores `tools`{NO_TOOLS}")
        key = (*messages, generation_prompt)
        text = self._rendered.get(key)
        if text is None:
            calls = any(message.calls or message.role == "tool" for message in messages)
            form = self._call_form if calls else _TEXT_FORM
            text = self._render(messages, tools, form, generation_prompt=generation_prompt)
            if len(self._rendered) >= MAX_RENDERED:
                self._rendered.clear()
            self._rendered[key] = text
        return text

    def _render(
        self,
        messages: Messages,
        tools: list[Any] | None,
        form: "_CallForm",
        *,
        generation_prompt: bool = True,
    ) -> str:
        import jinja2

        folded = messages if self.system_slot else _fold_system(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                [form.turn(message) for message in folded],
                chat_template=self.template,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{self.title}: line {error.lineno} of the template: {error.message}"
            ) from error
        except Exception as error:  # a template is a program and may raise anything
            reason = str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
            raise DataError(
                f"{self.title} can't render a dialogue with the roles"
                f" {', '.join(message.role for message in messages)}: {reason}; fix the"
                " template, choose another --format, or remove such dialogues"
            ) from error
        return str(text)

    @cached_property
    def _supports_tools(self) -> bool:
        return _FUNCTION["name"] in self._render(PROBE_PROMPT[:1], [_PROBE_TOOL], _TEXT_FORM)

    @cached_property
    def _call_form(self) -> "_CallForm":
        """The form of tool calls to use: the first that the template renders completely."""
        wrong = ("None", str(_CALL["arguments"]))  # Python's syntax, not JSON
        for fields in product((None, [_PROBE_TOOL]), (True, False), (False, True)):
            form = _CallForm(*fields)
            with suppress(DataError):
                text = self._render(PROBE_CALL, form.tools, form).partition("One?")[2]
                has_parts = all(part in text for part in (_CALL["name"], "Seven.", "Nine."))
                if has_parts and not any(part in text for part in wrong):
                    return form
        raise DataError(f"{self.title} does not support tool calls{NO_TOOLS}")

    def segments(self, messages: Messages, origin: str = "") -> list[Segment]:
        """Split the text of a dialogue where assistant turns begin and end.

        If the last turn is the assistant's, the text ends with the turn's end token; otherwise, it
        ends with the generation prompt.
        """
        *before, last = messages
        if last.role != "assistant":
            text = self.render(messages, generation_prompt=True)
            return self._split_history(messages, text, origin)
        if not before:  # plain text has no roles
            text = re.sub(rf"{re.escape(self._eos)}\s*\Z", "", last.content.removeprefix(self._bos))
            return [Segment(self._bos + text + self._eos, by_assistant=True)]
        prompt = self.render(before, generation_prompt=True)
        turn = self._render_turn(messages, prompt, origin)
        segments = self._split_history(before, prompt, origin)
        return segments + self._split_answer(messages, prompt, turn)

    def _split_history(self, messages: Messages, text: str, origin: str) -> list[Segment]:
        """Split `text`, the rendered `messages` and generation prompt, at its assistant turns.

        An answer that differs from its rendering as the last turn is not split off or trained on.
        """
        segments: list[Segment] = []
        position = 0
        for index, message in enumerate(messages):
            so_far = messages[: index + 1]
            if message.role != "assistant" or all(m.role != "user" for m in so_far):
                continue
            prompt = self.render(messages[:index], generation_prompt=True)
            is_closed = prompt.rstrip().endswith(END_THINK) and _thinks(message)
            turn = "" if is_closed else self._render_turn(so_far, prompt)
            body = turn.removesuffix(self._end_of_turn)
            self._common_prefix(so_far, prompt, text)
            if not turn or not text.startswith(prompt + body):
                if message.trained:
                    self._warn_once(origin, CHANGES_EARLIER_ANSWERS)
                continue
            segments.append(Segment(text[position : len(prompt)], by_assistant=False))
            position = len(prompt + body)
            if text.startswith(turn, len(prompt)):
                position = len(prompt + turn)
            elif self._end_of_last_turn or self._end_of_earlier_turn:
                turn = body  # its end differs from the last turn's: don't train on it
            segments += self._split_answer(so_far, prompt, turn)
        return [*segments, Segment(text[position:], by_assistant=False)]

    def _split_answer(self, messages: Messages, prompt: str, turn: str) -> list[Segment]:
        """Return the last turn's segments: two if the turn begins with text of the prompt."""
        last = messages[-1]
        if not last.prefill:
            return [Segment(turn, by_assistant=True, trained=last.trained)]
        start = self._render_prefill([*messages[:-1], replace(last, content=last.prefill)], prompt)
        rest = last.content[len(last.prefill) :].rstrip() + self._end_of_turn
        rest = turn[len(start) :] if turn.startswith(start) else rest
        return [Segment(start, by_assistant=False), Segment(rest, True, last.trained)]

    def _render_prefill(self, messages: Messages, prompt: str) -> str:
        """Render the last turn, which the response continues."""
        content = messages[-1].content
        text = self._render_turn(messages, prompt).removesuffix(self._end_of_turn)
        return text.rstrip() + content[len(content.rstrip()) :]

    def _render_turn(self, messages: Messages, prompt: str, origin: str = "") -> str:
        """Return the text that the model should write for the last of `messages`, with end token.

        `prompt` is the rendered text of the earlier turns, with the generation prompt. The result
        is the template's rendering if it continues `prompt` and contains the turn's text, otherwise
        the text as given; for tool calls that the template renders differently, it is empty.
        """
        text = self.render(messages, generation_prompt=False)
        *before, message = messages
        without_block = _without_block(prompt)
        differs = not text.startswith(without_block)
        if differs and (plain := [_without_thinking(turn) for turn in before]) != before:
            # Unlike the prompt, the rendering omits earlier thinking; the turn itself is the same.
            prompt = self.render(plain, generation_prompt=True)
            return self._render_turn([*plain, message], prompt, origin)
        rendered = text[len(self._common_prefix(messages, prompt, text)) :]
        has_blocks = re.search("</?think>", self.template)
        if not has_blocks and not _contains(rendered, message.reasoning):
            self._warn_once(origin, OMITS_REASONING)
            message = replace(message, reasoning="")
        extends_prompt = text.startswith(prompt)
        is_closed = prompt.rstrip().endswith(END_THINK) or not (extends_prompt or has_blocks)
        if origin and message.trained and is_closed and _thinks(message):
            raise DataError(
                f"{self.title} closes the thinking block in its prompts, but this response has"
                " thinking; set a template argument, such as --sft.data.template_args"
                " '{\"enable_thinking\": true}', or remove the thinking"
            )
        is_open = bool(_OPENING_TAG.search(prompt))
        is_kept = self._keeps_turn(message, rendered, origin)
        if has_blocks and not message.calls and _UNCLOSED_BLOCK.match(message.content):
            is_kept = False  # the template would treat it as an answer
        if extends_prompt and is_kept and _is_valid_block(text[len(prompt) :], is_open=is_open):
            return self._cut_at_end_token(text[len(prompt) :], message)
        if is_open and is_kept and rendered.lstrip().startswith(END_THINK):
            return self._cut_at_end_token(rendered, message)
        if not message.calls:
            return self._format_as_given(message, prompt) + self._end_of_turn
        if text.startswith(without_block):
            thinking = replace(message, content="".join(message.content.rpartition(END_THINK)[:2]))
            calls = _LEADING_BLOCK.sub("", rendered)
            return self._format_as_given(thinking, prompt) + self._cut_at_end_token(calls, message)
        if origin:
            raise DataError(f"{self.title} renders tool calls differently{UNSTABLE}")
        return ""

    def _keeps_turn(self, message: Message, rendered: str, origin: str) -> bool:
        """Return whether a rendered turn contains the message's text or at least its tool calls."""
        names = [call["function"]["name"] for call in message.calls]
        if any(rendered.count(name) < names.count(name) for name in names):
            raise DataError(f"{self.title} omits tool calls of a turn{NO_TOOLS}")
        if origin and names and rendered.count(self._end_of_turn) > 1:
            raise DataError(f"{self.title} writes text and tool calls as two turns{NO_TOOLS}")
        thinking, _, answer = message.content.rpartition(END_THINK)
        parts = (message.reasoning, thinking.strip().removeprefix(THINK), answer)
        is_kept = all(_contains(rendered, part) for part in parts)
        if not is_kept:
            self._warn_once(origin, OMITS_TEXT_WITH_CALLS if message.calls else OMITS_TEXT)
        return is_kept or bool(message.calls)

    def _common_prefix(self, messages: Messages, prompt: str, text: str) -> str:
        """Return the prefix, before the last turn, that a prompt and the full dialogue share."""
        if text.startswith(common := _without_block(prompt)):
            return common
        if text.startswith(common := self.render(messages[:-1], generation_prompt=False)):
            return common
        if any(m.reasoning or m.calls or END_THINK in m.content for m in messages):
            return ""
        raise DataError(f"{self.title} renders the start of a dialogue differently{UNSTABLE}")

    def _format_as_given(self, message: Message, prompt: str) -> str:
        """Return a turn's text as given, closing a thinking block that `prompt` leaves open."""
        text = message.content.strip()
        if message.reasoning and END_THINK not in text:
            text = f"{THINK}\n{message.reasoning.strip()}{CLOSE_THINK}{text}"
        opening = _OPENING_TAG.search(prompt)
        if not opening:
            return text
        space = opening["space"]
        if THINK not in text and END_THINK not in text:
            return (CLOSE_THINK.lstrip("\n") if space == "\n\n" else CLOSE_THINK) + text
        text = text.removeprefix(THINK)
        num_newlines = len(text) - len(text.lstrip("\n"))
        return text[min(num_newlines, len(space)) :]  # without the line breaks of the prompt

    def _cut_at_end_token(self, rendered: str, message: Message) -> str:
        """Cut the last turn after its end token, which is appended if the template has none."""
        if message.calls:
            end = rendered.rfind(self._end_of_call)
            return (rendered[:end] if end >= 0 else rendered.rstrip()) + self._end_of_call
        answer = message.content.rpartition(END_THINK)[2].strip()  # thinking may differ
        # The answer may be part of the end token, such as "end".
        before = rendered[: max(rendered.rfind(self._end_of_turn), 0)]
        start = (before if answer in before else rendered).rfind(answer) if answer else -1
        end = rendered.find(self._end_of_turn, start + len(answer) if start >= 0 else 0)
        return (rendered[:end] if end >= 0 else rendered.rstrip()) + self._end_of_turn

    def _warn_once(self, origin: str, warning: str) -> None:
        if origin and warning not in self._reported:
            self._reported.add(warning)
            logger.warning("%s: %s %s", origin, self.title, warning)

    def encode_prompt(
        self, messages: Messages, *, generation_prompt: bool = True, origin: str = ""
    ) -> list[int]:
        """Return the token ids of a dialogue that the assistant will continue.

        The dialogue ends in a user turn, after which `generation_prompt` adds the beginning of an
        assistant turn, or in an assistant turn to be continued. Errors name `origin`.

        Raises:
            DataError: the dialogue is empty, or the template can't render it as requested.
        """
        if all(message.role == "assistant" for message in messages):
            raise DataError("a prompt must have at least one turn that is not the assistant's")
        continues = messages[-1].role == "assistant"
        messages = self._strip_end_tokens(messages, origin)
        before = messages[:-1] if continues else messages
        with _add_origin_to_errors(origin):
            full = self.render(before, generation_prompt=True)
            segments = self._split_history(before, full, origin)
            if continues:
                segments.append(Segment(self._render_prefill(messages, full), by_assistant=False))
            elif not generation_prompt:
                text, last = self.render(messages, generation_prompt=False), segments[-1].text
                opening = full[len(text) :]
                if not (full.startswith(text) and last.endswith(opening)):
                    raise DataError(
                        f"{self.title} renders a dialogue differently without its generation"
                        " prompt; include the generation prompt"
                    )
                segments[-1] = Segment(last[: len(last) - len(opening)], by_assistant=False)
        return [token for ids in self._encode_segments(segments) for token in ids]

    def encode(
        self,
        prompt: Messages,
        response: Messages,
        train_on: Literal["assistant", "all"] = "assistant",
        *,
        origin: str = "",
    ) -> Encoded:
        """Return token ids, beginning with those of `encode_prompt(prompt)`, and a loss mask.

        The mask is true on the texts and end tokens of assistant turns, or with "all" on every
        token, but never on the first token or on turns that are not `trained`. If the prompt ends
        with an assistant turn, the response continues that turn. Errors name `origin`.

        Raises:
            DataError: `response` doesn't end in an assistant turn or can't be rendered; or, with
                `origin`, it contains thinking although the prompt closes the thinking block.
        """
        if not response or response[-1].role != "assistant":
            raise DataError("a response must end in an assistant turn")
        messages = [*prompt, *response]
        if prompt and prompt[-1].role == "assistant":
            prefilled, rest = self._strip_end_tokens(prompt, origin)[-1], response[0]
            text = prefilled.content + rest.content
            full = replace(prefilled, content=text, prefill=prefilled.content, trained=rest.trained)
            messages = [*prompt[:-1], full, *response[1:]]
        with _add_origin_to_errors(origin):
            segments = self.segments(self._strip_end_tokens(messages, origin), origin)
        input_ids: list[int] = []
        trained: list[bool] = []
        for segment, ids in zip(segments, self._encode_segments(segments), strict=True):
            input_ids += ids
            is_trained = segment.trained and (segment.by_assistant or train_on == "all")
            trained += [is_trained] * len(ids)
        trained[0] = False
        return Encoded(input_ids, trained)

    def encode_scored(
        self, prompt: Messages, response: Message, *, stopped: bool, max_length: int
    ) -> Encoded:
        """Return the tokens from which a response is scored, without an end token if unfinished.

        Long dialogues lose their beginning, since the score is read at the end.
        """
        encoded = self.encode(prompt, (response,))
        if not stopped and encoded.input_ids[-1] in self.stop_ids:
            encoded = encoded.head(len(encoded) - 1)
        return encoded.tail(max_length, keep_first=self.begins_with_cls)

    def _strip_end_tokens(self, messages: Messages, origin: str) -> Messages:
        """Remove end tokens from the rows' texts, since the format adds its own."""
        special_tokens = (*self._specials, *filter(None, [self._bos]))
        inputs = [turn.content.lstrip() for turn in messages if turn.role in ("system", "user")]
        if self.name != "plain" and any(text.startswith(special_tokens) for text in inputs):
            self._warn_once(origin, RENDERED_PROMPT)
        end_tokens = "|".join(map(re.escape, (self._end_of_turn, self._eos)))
        end = re.compile(rf"(?<!\s)(\s*({end_tokens}))+\s*\Z")  # (?<!\s) keeps the search linear
        answers = [turn.content for turn in messages if turn.role == "assistant"]
        if len(messages) == 1 or not any(map(end.search, answers)):
            return messages
        stripped = [
            replace(turn, content=end.sub("", turn.content)) if turn.role == "assistant" else turn
            for turn in messages
        ]
        self._warn_once(origin, DUPLICATE_END_TOKEN)
        return stripped

    def encode_observation(self, before: Messages, observation: Messages) -> list[int]:
        """Return the token ids of the turns that follow an answer, with the next generation prompt.

        Append the ids to the sampled ids of the answer. They encode the text between
        turns and the observation, as the template renders them after any answer. `before` is the
        dialogue up to and including the answer; the answers' texts don't affect the result.

        Raises:
            DataError: the template can't render such a dialogue, or omits one of its turns.
        """
        # Replace answers with a fixed text, so that their content can't affect the split.
        answer = PROBE_RESPONSE.content
        messages = [*before, *observation]
        while any(answer in turn.content for turn in messages if turn.role != "assistant"):
            answer += "."
        fixed = [
            Message("assistant", answer) if turn.role == "assistant" else turn
            for turn, after in zip(messages, [*messages[1:], None], strict=True)
            if turn.role != "assistant" or after is None or after.role != "assistant"
        ]
        text = self.render(fixed, generation_prompt=True).rpartition(answer)[2]
        for turn in observation:
            if turn.content.strip() not in text:
                raise DataError(
                    f"{self.title} omits the {turn.role} turn after an answer; make it part of "
                    f"the user's turn, or choose another --format"
                )
        for end in filter(None, (self._end_of_turn, self._end_of_earlier_turn)):
            if text.lstrip().startswith(end):
                text = text.lstrip().removeprefix(end)
                text = text.lstrip() if end in self._rstrip_tokens else text
                break
        return self._encoders[1](text)

    def _encode_segments(self, segments: Sequence[Segment]) -> list[list[int]]:
        first, following = self._encoders
        texts = [segment.text for segment in segments]
        ids = [first(texts[0])]
        for before, text in pairwise(texts):
            ids.append(following(text.lstrip() if before.endswith(self._rstrip_tokens) else text))
        return ids

    @cached_property
    def _rstrip_tokens(self) -> tuple[str, ...]:
        """Added tokens that strip the whitespace to their right, as in Phi 3's tokenizer."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(token.content for token in added if token.rstrip)

    @cached_property
    def _encoders(self) -> tuple[Encoder, Encoder]:
        self._require_tokens()
        return beginning_encoder(self.tokenizer), continuation_encoder(self.tokenizer)

    def _require_tokens(self) -> None:
        if self.new_tokens:
            raise ModelError(
                f"{self.title} needs the tokens {' '.join(self.new_tokens)}, which the tokenizer"
                " lacks: first add them and resize the model's embeddings"
            )

    @cached_property
    def _end_of_turn(self) -> str:
        """The special token that ends an assistant turn.

        If the last turn doesn't end with one, it is the token that begins the next turn (GLM's
        `<|user|>`), or else the end-of-sequence token.
        """
        return self._end_of_last_turn or self._end_of_earlier_turn or self._eos

    @cached_property
    def _end_of_last_turn(self) -> str:
        dialogue = self.render((*PROBE_PROMPT, PROBE_RESPONSE), generation_prompt=False)
        prompt = self.render(PROBE_PROMPT, generation_prompt=True)
        before, _, tail = dialogue.rpartition(PROBE_RESPONSE.content)
        between = before.removeprefix(prompt) if before.startswith(prompt) else ""  # as in Kimi K3
        matches = [token for token in self._specials if token in tail and token not in between]
        return min(matches, key=lambda token: (tail.find(token), -len(token)), default="")

    @cached_property
    def _end_of_call(self) -> str:
        """The special token after tool calls: `<|call|>` in Harmony, `<|observation|>` in GLM."""
        form = self._call_form
        text = self._render(PROBE_CALL[:2], form.tools, form, generation_prompt=False).rstrip()
        tail = text.rpartition("Seven.")[2]
        if end := next((end for end in (self._end_of_turn, self._eos) if end in tail), ""):
            return end
        if not self._end_of_last_turn:
            full = self._render(PROBE_CALL, form.tools, form)
            tail = full.removeprefix(text).lstrip()
            matches = [token for token in self._specials if tail.startswith(token)]
        else:
            matches = [token for token in self._specials if tail.endswith(token)]
        return max(matches, key=len, default=self._end_of_turn)

    @cached_property
    def _end_of_earlier_turn(self) -> str:
        """The special token right after an earlier answer (`<|end|>` in Harmony), if any."""
        dialogue = self.render(PROBE_PROMPT, generation_prompt=True)
        tail = dialogue.rpartition(PROBE_PROMPT[1].content)[2].lstrip()
        matches = [token for token in self._specials if tail.startswith(token)]
        return max(matches, key=len, default="")

    @cached_property
    def _specials(self) -> tuple[str, ...]:
        """Special tokens that may end a turn."""
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        added.update(self.tokenizer.all_special_tokens, self.tokens)
        excluded = {THINK, END_THINK, str(self.tokenizer.bos_token)} - {self._eos}
        return tuple(sorted(added - excluded))

    @property
    def _eos(self) -> str:
        return str(self.tokenizer.eos_token)

    @cached_property
    def _bos(self) -> str:
        return str(self.tokenizer.bos_token) if adds_bos(self.tokenizer) else ""


@contextmanager
def _add_origin_to_errors(origin: str) -> Iterator[None]:
    """Prefix errors with the origin of the row."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{origin}: {error}" if origin else str(error)) from error


class _CallForm(NamedTuple):
    """The form in which a template expects tool calls."""

    tools: list[Any] | None
    """Tools of the probe, if calls are rendered only in a dialogue with tools."""

    null_content: bool
    """Whether empty content is null in turns with tool calls."""

    json_arguments: bool
    """Whether arguments are JSON text."""

    def turn(self, message: Message) -> dict[str, Any]:
        """Return the turn in the form that the template expects."""
        turn = message.turn
        for call in turn.get("tool_calls", []) if self.json_arguments else []:
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        if self.null_content and message.calls and not message.content:
            turn["content"] = None
        return turn | (dict.fromkeys(REASONING, message.reasoning) if message.reasoning else {})


_TEXT_FORM = _CallForm(None, null_content=False, json_arguments=False)


def _thinks(message: Message) -> bool:
    return bool(message.reasoning or _FILLED_BLOCK.match(message.content))


def _without_thinking(message: Message) -> Message:
    _, end, answer = message.content.rpartition(END_THINK)
    return replace(message, content=answer.lstrip() if end else answer, reasoning="")


def _without_block(prompt: str) -> str:
    """Return the prompt without an open or empty thinking block at its end."""
    return re.sub(r"(<think>\s*</think>|</?think>)\s*\Z", "", prompt)


def _is_valid_block(turn: str, *, is_open: bool) -> bool:
    """Return whether a rendered turn closes its prompt's thinking block, and opens no other."""
    if is_open:
        rest = turn.lstrip().removeprefix(END_THINK).lstrip()  # after an empty block
        return END_THINK in turn and not rest.startswith(THINK)
    empty = _EMPTY_BLOCK.match(turn)
    return not (empty and END_THINK in turn[empty.end() :])


def _contains(text: str, part: str) -> bool:
    return part.strip() in text or "".join(part.split()) in "".join(text.split())


def _fold_system(messages: Messages) -> list[Message]:
    """Prepend each system message to the next user turn, or else append it to the previous one."""
    folded: list[Message] = []
    system: list[str] = []
    for message in (*messages, None):
        is_user = message is not None and message.role == "user"
        if message is not None and message.role == "system":
            system.append(message.content)
            continue
        if system and not is_user and folded and folded[-1].role == "user":
            folded[-1] = Message("user", "\n\n".join([folded[-1].content, *system]))
            system = []
        if message is not None:
            text = "\n\n".join([*system, message.content])
            folded.append(Message("user", text) if system and is_user else message)
            system = [] if is_user else system
    return folded
