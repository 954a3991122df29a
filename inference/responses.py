"""Respond to the prompts in a file; an interrupted run can be resumed."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.requests import Response, sample_key
from inference.engine.sampling import TokenLogprobs, make_sampler
from inference.generation import generate_each
from inference.settings import Sampling
from inference.text import continuation, encode_text, plain_text
from pipeline.data.chat.encoders import end_ids
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.data.examples import Message
from pipeline.data.rows.columns import SkipRow, add_tools, read_turns
from pipeline.data.rows.sources import Row, reject_surrogates
from pipeline.models.forward.forward import context_length
from pipeline.system.errors import DataError, one_line
from pipeline.system.logs import Progress


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    value: object
    """The value of `prompt` or `messages` in the file."""

    messages: tuple[Message, ...]
    """The dialogue; a text prompt becomes one user message."""

    text: str | None
    """The prompt text; None if the line has messages."""

    origin: str
    """File and line, for error messages."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the line, which the output keeps."""


def read_prompts(path: Path) -> list[Prompt]:
    """Read the prompts in a .jsonl file; blank lines are skipped.

    Raises:
        DataError: the file can't be read, or contains no prompts or a line that is not a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise DataError(f"--prompts {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read as text: {error}") from None
    prompts = [
        parse_prompt(line, origin=f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise DataError(f"{path} has no prompts")
    return prompts


def parse_prompt(line: str, *, origin: str) -> Prompt:
    """Parse one line of a prompt file.

    Raises:
        DataError: the line is not a prompt; the message begins with `origin`.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also huge numbers
        raise DataError(f"{origin} is not valid JSON: {one_line(error)}") from None
    reject_surrogates(row, origin)
    if not isinstance(row, Mapping) or ("prompt" in row) == ("messages" in row):
        raise DataError(f'{origin} must be an object with either "prompt" or "messages"')
    columns = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
    if "messages" in row:
        messages = parse_messages(row, origin=origin)
        return Prompt(row["messages"], messages, None, origin, columns)
    text = row["prompt"]
    if not isinstance(text, str):
        raise DataError(f'{origin}: "prompt" must be text')
    return Prompt(text, (Message("user", text),), text, origin, columns)


def parse_messages(row: Mapping[str, Any], *, origin: str) -> tuple[Message, ...]:
    """Parse `messages`, and `tools` if there are any, in the same forms as in training rows.

    The last message is from the user or a tool, or is the beginning of the response.
    """
    try:
        messages = add_tools(Row(row, origin), read_turns(Row(row, origin), "messages"))
    except SkipRow as reason:
        raise DataError(f"{origin}: a dialogue {reason} can't be continued") from None
    if not messages or messages[-1].role == "system" or messages[-1].calls:
        raise DataError(
            f"{origin}: the last message must be from the user or a tool, or be the beginning of"
            " the response"
        )
    if all(message.role != "user" for message in messages):
        raise DataError(f"{origin}: there is no user message")
    return messages


@dataclass(frozen=True)
class TextResponse:
    """A response, cut before its first stop string."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TokenLogprobs]

    stop: str
    """The reason why it ended: eos, length or stop_string."""


@dataclass
class Responder:
    """Generates a model's responses with fixed settings."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    _: KW_ONLY
    raw: bool = False
    num_samples: int = 1
    num_top: int = 0
    stop_strings: Sequence[str] = ()
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        self.chat_format = None if self.raw else resolve_format(self.tokenizer, "auto")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return self.chat_format.stop_ids if self.chat_format else end_ids(self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, rendered with the chat format unless `raw` is set.

        Raises:
            DataError: the prompt is a dialogue although `raw` is set, or it is empty or too long.
        """
        if self.chat_format is not None:
            token_ids = self.chat_format.encode_prompt(prompt.messages)
        elif prompt.text is None:
            raise DataError(f'{prompt.origin} has "messages", but --raw requires a text "prompt"')
        else:
            token_ids = encode_text(self.tokenizer, prompt.text)
        limit = context_length(self.model)
        if not 0 < len(token_ids) < limit:
            raise DataError(
                f"{prompt.origin}: the prompt has {len(token_ids)} tokens; it must have at least 1"
                f" and fit in the model's context of {limit} with its response"
            )
        return token_ids

    def responses(
        self, prompts: Sequence[Sequence[int]], *, first_row: int, batch_size: int
    ) -> Iterator[list[TextResponse]]:
        """Yield `num_samples` responses to each prompt, in the order of the prompts.

        A response depends only on its prompt, its row in the file, the index of the sample and the
        settings, not on other prompts; `first_row` is the row of the first prompt.
        """
        count = self.num_samples
        completions = generate_each(
            self.model,
            [prompt for prompt in prompts for _ in range(count)],
            make_sampler(self.sampling, self.stop_ids),
            max_new_tokens=self.sampling.max_new_tokens,
            keys=[
                sample_key(first_row + row, sample)
                for row in range(len(prompts))
                for sample in range(count)
            ],
            batch_size=batch_size,
            cache_bytes=self.cache_bytes,
            num_top=self.num_top or None,
            stop_when=self._has_stop_string if self.stop_strings else None,
        )
        ready: dict[int, TextResponse] = {}
        row = 0
        for completion in completions:
            ready[completion.index] = self.finish(completion.prompt, completion.response)
            while row < len(prompts) and all(row * count + i in ready for i in range(count)):
                yield [ready.pop(row * count + sample) for sample in range(count)]
                row += 1

    def _has_stop_string(self, _: int, token_ids: Sequence[int]) -> bool:
        """Return whether the newest token of a response completes a stop string."""
        # A token has at least one byte. Four more tokens keep the space before the first word.
        longest = 4 + max(len(stop.encode()) for stop in self.stop_strings)
        tail = plain_text(self.tokenizer, list(token_ids[-longest:]))
        return any(stop in tail for stop in self.stop_strings) and any(
            stop in plain_text(self.tokenizer, list(token_ids)) for stop in self.stop_strings
        )

    def finish(self, prompt: Sequence[int], response: Response) -> TextResponse:
        """Decode a response to `prompt`, and cut it before the first stop string."""

        def decode(token_ids: list[int]) -> str:
            # Raw text continues the prompt, so its first word keeps its space.
            return continuation(self.tokenizer, list(prompt) if self.raw else [], token_ids)

        text, num_tokens = decode(response.text_ids), len(response.ids)
        reason = "eos" if response.stopped else "length"
        if ends := [index for stop in self.stop_strings if (index := text.find(stop)) >= 0]:
            text, reason = text[: min(ends)], "stop_string"
            # The length of the shortest prefix whose text contains a stop string.
            num_tokens = next(
                count
                for count in range(1, len(response.ids) + 1)
                if any(stop in decode(response.ids[:count]) for stop in self.stop_strings)
            )
        return TextResponse(
            text if self.raw else text.strip(),
            response.ids[:num_tokens],
            response.logprobs[:num_tokens],
            response.top_logprobs[:num_tokens],
            reason,
        )

    def fingerprint(self, prompts: Sequence[Prompt], model_path: str) -> str:
        """Return eight hexadecimal digits that identify everything the responses depend on."""
        directory = Path(model_path)
        files = sorted(directory.glob("*")) if directory.is_dir() else []
        mtimes = [(file.name, file.stat().st_mtime_ns) for file in files]
        identity = {
            "model": [model_path, str(self.model.dtype), *mtimes],
            "sampling": dataclasses.asdict(self.sampling),
            "rest": [self.raw, self.num_samples, self.num_top, self.stop_strings],
            "prompts": [[prompt.value, prompt.columns] for prompt in prompts],
        }
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]


def write_responses(
    responder: Responder, prompts: Sequence[Prompt], out: Path, *, model_path: str, batch_size: int
) -> None:
    """Write a line of responses for each prompt to `out`, which appears once it is complete.

    Until then, the lines are in `<out>.<fingerprint>.partial`; the same call continues from them.

    Raises:
        DataError: a prompt can't be encoded (raised before generation), or `out` can't be written.
    """
    encoded = [responder.encode(prompt) for prompt in prompts]
    partial = out.with_name(f"{out.name}.{responder.fingerprint(prompts, model_path)}.partial")
    progress = Progress("generate", len(prompts))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        done = truncate_partial_line(partial)
        with partial.open("ab", buffering=0) as file:
            progress.start()
            start_time, num_tokens = time.perf_counter(), 0
            rows = responder.responses(encoded[done:], first_row=done, batch_size=batch_size)
            for row, responses in enumerate(rows, start=done):
                file.write(format_line(prompts[row], responses))
                num_tokens += sum(len(response.token_ids) for response in responses)
                seconds = time.perf_counter() - start_time
                rate = {"tokens_per_second": num_tokens / seconds}
                progress.update(row + 1, rate, seconds=seconds)
        partial.replace(out)
    except OSError as error:
        raise DataError(f"--out {out} can't be written: {error.strerror}") from error
    finally:
        progress.stop()


def format_line(prompt: Prompt, responses: Sequence[TextResponse]) -> bytes:
    """Format a line of the output."""
    row = {
        "prompt": prompt.value,
        **prompt.columns,
        "answers": [response.text for response in responses],
        "token_ids": [response.token_ids for response in responses],
        "logprobs": [response.logprobs for response in responses],
        "stop": [response.stop for response in responses],
    }
    top = [[token.top for token in response.top_logprobs] for response in responses]
    if any(top):
        row["top_token_ids"] = [[[id_ for id_, _ in t] for t in tokens] for tokens in top]
        row["top_logprobs"] = [[[round(x, 6) for _, x in t] for t in tokens] for tokens in top]
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def truncate_partial_line(path: Path) -> int:
    """Truncate a file to its complete lines and return their number."""
    if not path.is_file():
        return 0
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if complete != content:
        path.write_bytes(complete)
    return complete.count(b"\n")
