"""Responses to many prompts, in a file that survives being killed."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.engine.requests import sample_key
from inference.engine.sampling import sampler_of
from inference.files.prompts import Prompt
from inference.generation import Response, generate_each
from inference.settings import Sampling
from inference.streaming import continuation, plain_text
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.errors import DataError
from pipeline.models.forward import context_length
from pipeline.progress import Progress


@dataclass(frozen=True)
class TextResponse:
    """One response, cut where it ends."""

    text: str
    token_ids: list[int]
    logprobs: list[float]

    stop: str
    """Why it ended: eos, length or stop_string."""


class Responder:
    """A model with all that decides its responses."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        raw: bool = False,
        num_samples: int = 1,
        stop_strings: Sequence[str] = (),
        cache_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.raw = raw
        self.num_samples = num_samples
        self.stop_strings = tuple(stop_strings)
        self.cache_bytes = cache_bytes
        self.chat_format = None if raw else resolve_format(tokenizer, "auto")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        if self.chat_format is not None:
            return self.chat_format.stop_ids
        eos = self.tokenizer.eos_token_id
        assert isinstance(eos, int)
        return (eos,)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: by the chat format, or the text as it is.

        Raises:
            DataError: the prompt is a dialogue and `raw` is on, or it is too long for the model.
        """
        if self.chat_format is not None:
            token_ids = self.chat_format.encode_prompt(prompt.messages)
        elif prompt.text is None:
            raise DataError(f'{prompt.origin} has "messages": --raw continues a "prompt" text')
        else:
            token_ids = list(self.tokenizer(prompt.text, verbose=False)["input_ids"])
        limit = context_length(self.model)
        if not 0 < len(token_ids) < limit:
            raise DataError(
                f"{prompt.origin}: the prompt has {len(token_ids)} tokens; the model reads 1 to"
                f" {limit}, and answers in the same {limit}"
            )
        return token_ids

    def responses(
        self, prompts: Sequence[Sequence[int]], *, first_row: int, batch_size: int
    ) -> Iterator[list[TextResponse]]:
        """`num_samples` responses to each prompt, prompt after prompt as they are ready.

        A response depends on its prompt, its row in the file, the number of the sample and the
        settings, not on what is answered beside it: `first_row` is the row of the first prompt.
        """
        count = self.num_samples
        finished = generate_each(
            self.model,
            [prompt for prompt in prompts for _ in range(count)],
            sampler_of(self.sampling, self.stop_ids),
            max_new_tokens=self.sampling.max_new_tokens,
            keys=[
                sample_key(first_row + row, sample)
                for row in range(len(prompts))
                for sample in range(count)
            ],
            batch_size=batch_size,
            cache_bytes=self.cache_bytes,
            stop_when=self._says_stop if self.stop_strings else None,
        )
        ready: dict[int, TextResponse] = {}
        row = 0
        for each in finished:
            ready[each.index] = self.finish(each.prompt, each.response)
            while row < len(prompts) and all(row * count + i in ready for i in range(count)):
                yield [ready.pop(row * count + sample) for sample in range(count)]
                row += 1

    def _says_stop(self, index: int, token_ids: Sequence[int]) -> bool:
        """Whether a response has a stop string, in which case its last token completed it."""
        del index  # every response has the same stop strings
        # A token is a byte at least. The tokens before keep the space of the first word.
        longest = 4 + max(len(stop.encode()) for stop in self.stop_strings)
        end = plain_text(self.tokenizer, list(token_ids[-longest:]))
        return any(stop in end for stop in self.stop_strings) and any(
            stop in plain_text(self.tokenizer, list(token_ids)) for stop in self.stop_strings
        )

    def finish(self, prompt: Sequence[int], response: Response) -> TextResponse:
        """The text of a response to `prompt`, cut before the first stop string, with its tokens."""

        def read(token_ids: list[int]) -> str:
            # A text goes on where it was: its first word keeps its space. A response begins anew.
            return continuation(self.tokenizer, list(prompt) if self.raw else [], token_ids)

        text = read(response.ids)
        found = [place for stop in self.stop_strings if (place := text.find(stop)) >= 0]
        if not found:
            stop = "eos" if response.stopped else "length"
            return TextResponse(self._trim(text), response.ids, response.logprobs, stop)
        # The shortest run of tokens whose text has a stop string.
        needed = next(
            number
            for number in range(1, len(response.ids) + 1)
            if any(stop in read(response.ids[:number]) for stop in self.stop_strings)
        )
        ids, logprobs = response.ids[:needed], response.logprobs[:needed]
        return TextResponse(self._trim(text[: min(found)]), ids, logprobs, "stop_string")

    def _trim(self, text: str) -> str:
        """A response without the space around it; a text that goes on keeps it."""
        return text if self.raw else text.strip()

    def fingerprint(self, prompts: Sequence[Prompt], model_path: str) -> str:
        """Eight hexadecimal digits that change with whatever changes the responses."""
        directory = Path(model_path)
        files = sorted(directory.glob("*")) if directory.is_dir() else []
        identity = {
            "model": [model_path, *((file.name, file.stat().st_mtime_ns) for file in files)],
            "sampling": dataclasses.asdict(self.sampling),
            "rest": [self.raw, self.num_samples, self.stop_strings],
            "prompts": [prompt.given for prompt in prompts],
        }
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:8]


def write_responses(
    responder: Responder, prompts: Sequence[Prompt], out: Path, *, model_path: str, batch_size: int
) -> None:
    """Write a line of responses for each prompt to `out`, which appears when all are there.

    Until then the lines are in `<out>.<fingerprint>.partial`; the same call goes on from them.

    Raises:
        DataError: a prompt can't be encoded, before anything is generated; or `out` can't be
            written.
    """
    encoded = [responder.encode(prompt) for prompt in prompts]
    partial = out.with_name(f"{out.name}.{responder.fingerprint(prompts, model_path)}.partial")
    progress = Progress("generate", len(prompts))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        done = keep_whole_lines(partial)
        with partial.open("ab", buffering=0) as file:
            progress.start()
            started, num_tokens = time.perf_counter(), 0
            rows = responder.responses(encoded[done:], first_row=done, batch_size=batch_size)
            for row, responses in enumerate(rows, start=done):
                file.write(as_line(prompts[row], responses))
                num_tokens += sum(len(response.token_ids) for response in responses)
                seconds = time.perf_counter() - started
                rate = {"tokens_per_second": num_tokens / seconds}
                progress.update(row + 1, rate, seconds=seconds)
        partial.replace(out)
    except OSError as error:
        raise DataError(f"--out {out} can't be written: {error.strerror}") from error
    finally:
        progress.stop()


def as_line(prompt: Prompt, responses: Sequence[TextResponse]) -> bytes:
    """One line of the output."""
    row = {
        "prompt": prompt.given,
        "answers": [response.text for response in responses],
        "token_ids": [response.token_ids for response in responses],
        "logprobs": [response.logprobs for response in responses],
        "stop": [response.stop for response in responses],
    }
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def keep_whole_lines(path: Path) -> int:
    """Cut off what a kill left of a line at the end of the file; return the number of lines."""
    if not path.is_file():
        return 0
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return whole.count(b"\n")
