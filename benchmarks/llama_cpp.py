"""llama.cpp as a peer in generation, through llama-cpp-python's bindings of its C interface."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as lib  # pyrefly: ignore[missing-import]


class LlamaCpp:
    """A GGUF model that decodes several prompts in one batch, with llama.cpp's default settings.

    Args:
        path: the GGUF file.
        num_rows: number of prompts.
        context: maximum tokens per prompt and response.
        threads: number of threads.
    """

    def __init__(self, path: Path, *, num_rows: int, context: int, threads: int) -> None:
        lib.llama_log_set(_ignore_log, None)
        self._model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = num_rows * context
        settings.n_seq_max = num_rows
        settings.n_threads = settings.n_threads_batch = threads
        self._context = lib.llama_init_from_model(self._model, settings)
        self._batch = lib.llama_batch_init(num_rows * context, 0, 1)
        self._sampler = lib.llama_sampler_init_greedy()

    def generate(self, prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
        """Return greedy responses of `length` tokens."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        rows = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        responses = [[token] for token in self._decode(rows)]
        for step in range(length - 1):
            last = [
                (response[-1], len(prompt) + step, row, True)
                for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
            ]
            for response, token in zip(responses, self._decode(last), strict=True):
                response.append(token)
        return responses

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Decode (token, position, row, is last); return the most likely token after each last."""
        batch: Any = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, row, is_last) in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
            batch.logits[index] = is_last
        if lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp could not decode the batch")
        return [
            lib.llama_sampler_sample(self._sampler, self._context, index)
            for index, token in enumerate(tokens)
            if token[3]
        ]


@lib.llama_log_callback
def _ignore_log(_level: int, _text: bytes, _data: Any) -> None:  # noqa: ANN401
    """Discard llama.cpp's log."""
