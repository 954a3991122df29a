"""HTTP endpoints: POST of JSON with retries, cached replies, and remote reward services."""

import hashlib
import http.client
import ipaddress
import json
import os
import random
import tempfile
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, require
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome, Scorer, everywhere, member, outcomes_of
from rewards.functions import prompt_text


class Answers:
    """Files by the hash of what was asked, in a directory that several processes share.

    Args:
        directory: where; None keeps nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def get(self, request: object) -> Any | None:  # noqa: ANN401
        """The answer to an equal request; None where there is none, or its file is damaged."""
        path = self._path(request)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def put(self, request: object, answer: object) -> None:
        """Keep an answer; a process that is killed meanwhile leaves no part of it."""
        path = self._path(request)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(answer, file)
        Path(name).replace(path)

    def _path(self, request: object) -> Path | None:
        if self._directory is None:
            return None
        text = json.dumps(request, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        return self._directory / name[:2] / f"{name}.json"


FIRST_PAUSE = 0.5
"""Seconds before the second attempt."""

LONGEST_PAUSE = 30.0
"""Seconds: a server's Retry-After is followed up to this."""

LARGEST_ANSWER = 16 << 20
"""Bytes of a server's answer that are read at most."""

_PASSING = {408, 425, 429, 500, 502, 503, 504}


class EndpointError(Exception):
    """An endpoint gave no usable answer; the message is a sentence."""


class _PassingError(EndpointError):
    """An error that may be gone at the next attempt."""

    def __init__(self, sentence: str, pause: float | None = None) -> None:
        super().__init__(sentence)
        self.pause = pause


@dataclass(frozen=True)
class Endpoint:
    """Where to send requests, and how often."""

    url: str
    timeout_seconds: float
    """Of one request, from its first byte to the last of its answer."""

    attempts: int
    key_variable: str | None

    def post(self, body: object) -> Any:  # noqa: ANN401
        """The JSON that comes back.

        Raises:
            EndpointError: after the last attempt, or at once where another would fail as well.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return self._once(json.dumps(body).encode())
            except _PassingError as error:
                if attempt == self.attempts:
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise EndpointError(f"{error}{tries}") from None
                pause = FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                time.sleep(min(LONGEST_PAUSE, pause if error.pause is None else error.pause))
        raise AssertionError

    @property
    def longest_seconds(self) -> float:
        """The time of all attempts with the longest pauses between them."""
        return self.attempts * self.timeout_seconds + (self.attempts - 1) * LONGEST_PAUSE

    def _once(self, body: bytes) -> Any:  # noqa: ANN401
        parts = urllib.parse.urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        host = parts.hostname or ""
        connection = kind(host, parts.port, timeout=self.timeout_seconds)
        deadline = time.monotonic() + self.timeout_seconds
        path = parts.path or "/"
        try:
            connection.request(
                "POST", f"{path}?{parts.query}" if parts.query else path, body, self._headers()
            )
            response = connection.getresponse()
            content = self._read(connection, response, deadline)
        except TimeoutError:
            raise _PassingError(
                f"{self.url} gave no answer within {self.timeout_seconds:g} s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise _PassingError(f"{self.url} can't be reached: {error or type(error)}") from None
        finally:
            connection.close()
        return _answer(self.url, response, content)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self.key_variable, '')}"
        return headers

    def _read(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        deadline: float,
    ) -> bytes:
        """The body, within the deadline also from a server that sends a byte at a time."""
        chunks: list[bytes] = []
        size = 0
        while size <= LARGEST_ANSWER:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if connection.sock is not None:
                connection.sock.settimeout(left)
            chunk = response.read1(1 << 16)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
            size += len(chunk)
        raise EndpointError(f"{self.url} answered more than {LARGEST_ANSWER >> 20} MiB")


def endpoint_of(config: RewardConfig, url: str, timeout_seconds: float) -> Endpoint:
    """The endpoint of a source.

    Raises:
        ConfigError: the address is none, or would send the data in clear over a network, or the
            environment variable of the key is not set.
    """
    where = f"rewards.{config.name}"
    parts = urllib.parse.urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        local = _is_local(parts.hostname or "") and (parts.port or 1) > 0
    except ValueError:
        known = local = False
    require(known, f"{where}.path must be an address as https://HOST/PATH, got {url}")
    require(
        parts.username is None,
        f"{where}.path holds a password; name the environment variable of a key in key_variable",
    )
    require(
        parts.scheme == "https" or local or config.insecure,
        f"{where}.path: http:// sends prompts and keys in clear to {parts.hostname}; use https://,"
        " or say insecure: true within a network of your own",
    )
    variable = config.key_variable
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"{where}.key_variable: the environment variable {variable} is not set")
    return Endpoint(url, timeout_seconds, config.attempts, variable)


def _answer(url: str, response: http.client.HTTPResponse, content: bytes) -> Any:  # noqa: ANN401
    if response.status in _PASSING:
        pause = _seconds(response.getheader("Retry-After"))
        raise _PassingError(f"{url} answered {response.status} {response.reason}", pause)
    if response.status != 200:
        text = " ".join(content[:200].decode(errors="replace").split())
        raise EndpointError(f"{url} answered {response.status} {response.reason}: {text}")
    try:
        return json.loads(content)
    except ValueError:
        text = content[:80].decode(errors="replace")
        raise EndpointError(f"{url} answered what is not JSON: {text}") from None


def _seconds(header: str | None) -> float | None:
    """Seconds that Retry-After asks for; a date is not followed, since clocks differ."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def remote_scorer(config: RewardConfig, endpoint: Endpoint, kept: Answers) -> Scorer:
    """Scores the episodes of a call by one request, but for those whose reward is known.

    `query` has prompts with their responses, `prompts` the prompts, `labels` the column of the
    rows. The answer is {"rewards": [...]}, in which null says that there is no reward.
    """
    column = config.reads_column or ""

    def query(episode: Episode) -> dict[str, Any]:
        prompt = prompt_text(episode.prompt)
        label = episode.extra.get(column)
        return {"query": prompt + episode.response, "prompts": prompt, "labels": label}

    def score(episodes: Sequence[Episode]) -> list[Outcome]:
        requests = [query(each) for each in episodes]
        known = [kept.get({"url": endpoint.url, **each}) for each in requests]
        missing = [each for each, answer in zip(requests, known, strict=True) if answer is None]
        scored = iter(_posted(endpoint, missing))
        outcomes: list[Outcome] = []
        for each, answer in zip(requests, known, strict=True):
            outcome = next(scored) if answer is None else Outcome(answer["reward"])
            if answer is None and outcome.failure is None:
                kept.put({"url": endpoint.url, **each}, {"reward": outcome.value})
            outcomes.append(outcome)
        return outcomes

    return Scorer(score, batched=True)


def _posted(endpoint: Endpoint, requests: Sequence[dict[str, Any]]) -> list[Outcome]:
    if not requests:
        return []
    body = {name: [each[name] for each in requests] for name in ("query", "prompts", "labels")}
    try:
        answer = endpoint.post(body)
    except EndpointError as error:
        return everywhere(str(error), len(requests))
    return outcomes_of(member(answer, ("rewards",)), len(requests))
