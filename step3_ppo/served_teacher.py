"""A teacher behind an OpenAI-compatible server, such as vLLM, SGLang or `inference.serve`."""

import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerBase

from pipeline.system.errors import ModelError, require
from rewards.endpoint import Endpoint, EndpointError, is_local

logger = logging.getLogger(__name__)

KEY_VARIABLE = "TEACHER_API_KEY"
"""Environment variable that holds the server's API key, if it needs one."""

CONCURRENCY = 16
"""Number of concurrent requests per process; servers such as vLLM batch them."""

TIMEOUT_SECONDS = 600.0
ATTEMPTS = 5

SAMPLE = "naïve café, 1,234.56 kg;\n\n\tdef f(x): return x  # 東京 🙂"
"""A text that different tokenizers split differently."""


class ServedTeacher:
    """A teacher whose log-probabilities come from a server's `POST /v1/completions`.

    Each request contains the token ids of a prompt and its response. The reply contains their
    log-probabilities at temperature 1 (`echo`, without new tokens).

    Raises:
        ConfigError: the API key would be sent unencrypted over a network.
        ModelError: the server returns no log-probabilities, or uses a different tokenizer.
    """

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerBase) -> None:
        root = url.rstrip("/").removesuffix("/v1")
        key = KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None
        parts = urlsplit(root)
        require(
            key is None or parts.scheme == "https" or is_local(parts.hostname or ""),
            f"--teacher {url} would send {KEY_VARIABLE} unencrypted; use https:// or unset the key",
        )
        self._completions = Endpoint(f"{root}/v1/completions", TIMEOUT_SECONDS, ATTEMPTS, key)
        self._tokenize = Endpoint(f"{root}/tokenize", TIMEOUT_SECONDS, 1, key)
        self._pool = ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="teacher")
        ids = tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
        self._request_logprobs(ids[:1], ids[1:])  # fails early if the server returns none
        self._check_tokenizer(ids)

    def submit(
        self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> list[Future[list[float]]]:
        """Request the log-probabilities of the responses' tokens, without waiting for them."""
        return [
            self._pool.submit(self._request_logprobs, list(prompt), list(response))
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def _request_logprobs(self, prompt: list[int], response: list[int]) -> list[float]:
        body = {"prompt": prompt + response, "max_tokens": 0, "echo": True, "logprobs": 1}
        reply = self._post(self._completions, {**body, "temperature": 1.0})
        end = len(prompt) + len(response)
        try:
            values = reply["choices"][0]["logprobs"]["token_logprobs"][len(prompt) : end]
            logprobs = [float(value) for value in values]
        except (KeyError, IndexError, TypeError, ValueError):
            logprobs = []
        if len(logprobs) != len(response) or not all(map(math.isfinite, logprobs)):
            raise ModelError(
                f"{self._completions.url} returned no log-probabilities of the prompt's tokens; the"
                " teacher's server must support echo with logprobs, as vLLM and SGLang do"
            )
        return logprobs

    def _check_tokenizer(self, ids: Sequence[int]) -> None:
        """Compare the token ids of a sample text, if the server has /tokenize, as vLLM does."""
        try:
            body = {"prompt": SAMPLE, "add_special_tokens": False}
            reply = self._tokenize.post(body)["tokens"]
        except (EndpointError, KeyError, TypeError):
            logger.warning(
                "the teacher's server has no /tokenize; assuming the same tokenizer as the actor's"
            )
            return
        if reply != ids:
            raise ModelError(
                f"the tokenizer of the teacher at {self._tokenize.url.removesuffix('/tokenize')}"
                " differs from the actor's; use a teacher and an actor of the same family"
            )

    @staticmethod
    def _post(endpoint: Endpoint, body: object) -> Any:  # noqa: ANN401
        try:
            return endpoint.post(body)
        except EndpointError as error:
            raise ModelError(
                f"the teacher gave no log-probabilities: {error}; run the same command with"
                " --resume to continue from the last checkpoint"
            ) from None


def collect(pending: Sequence[Future[list[float]]]) -> list[list[float]]:
    """Wait for requests and return their results; if one fails, cancel those not yet started.

    Raises:
        ModelError: a request failed, or its reply contained no log-probabilities.
    """
    try:
        return [request.result() for request in pending]
    except BaseException:
        for request in pending:
            request.cancel()
        raise
