"""HTTP endpoints: POST of JSON with retries, and remote reward services."""

import http.client
import ipaddress
import json
import os
import random
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.system.errors import ConfigError, require
from rewards.config import RewardConfig
from rewards.contract import Episode, Outcome, Scorer, everywhere, parse_outcomes
from rewards.functions import prompt_text

FIRST_PAUSE = 0.5
"""Seconds before the second attempt."""

LONGEST_PAUSE = 30.0
"""Maximum seconds between attempts, even if a server's Retry-After is longer."""

LARGEST_REPLY = 16 << 20
"""Maximum bytes of a server's reply."""

_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}


class EndpointError(Exception):
    """An endpoint gave no usable reply; the message is a sentence."""


class _TransientError(EndpointError):
    """An error that may not occur on another attempt."""

    def __init__(self, sentence: str, pause: float | None = None) -> None:
        super().__init__(sentence)
        self.pause = pause


@dataclass(frozen=True)
class Endpoint:
    """Request address and limits of an endpoint."""

    url: str
    timeout_seconds: float
    """Maximum seconds per request."""

    attempts: int
    key_variable: str | None

    def post(self, body: object) -> Any:  # noqa: ANN401
        """Send JSON and return the JSON of the reply.

        Raises:
            EndpointError: the last attempt failed, or one failed in a way that retrying won't fix.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return self._post_once(json.dumps(body).encode())
            except _TransientError as error:
                if attempt == self.attempts:
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise EndpointError(f"{error}{tries}") from None
                pause = FIRST_PAUSE * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                time.sleep(min(LONGEST_PAUSE, pause if error.pause is None else error.pause))
        raise AssertionError

    @property
    def longest_seconds(self) -> float:
        """Maximum seconds for all attempts, with the longest pauses between them."""
        return self.attempts * self.timeout_seconds + (self.attempts - 1) * LONGEST_PAUSE

    def _post_once(self, body: bytes) -> Any:  # noqa: ANN401
        parts = urllib.parse.urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_seconds)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self.key_variable, '')}"
        try:
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            content = response.read(LARGEST_REPLY + 1)
        except TimeoutError:
            raise _TransientError(
                f"{self.url} did not reply within {self.timeout_seconds:g} s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise _TransientError(f"{self.url} can't be reached: {error or type(error)}") from None
        finally:
            connection.close()
        return self._read(response, content)

    def _read(self, response: http.client.HTTPResponse, content: bytes) -> Any:  # noqa: ANN401
        replied = f"{self.url} returned {response.status} {response.reason}"
        if response.status in _TRANSIENT:
            try:
                pause = max(0.0, float(response.getheader("Retry-After") or ""))
            except ValueError:  # missing, or a date, which is ignored since clocks differ
                pause = None
            raise _TransientError(replied, pause)
        text = " ".join(content[:200].decode(errors="replace").split())
        if response.status != 200:
            raise EndpointError(f"{replied}: {text}")
        if len(content) > LARGEST_REPLY:
            raise EndpointError(f"{self.url} returned more than {LARGEST_REPLY >> 20} MiB")
        try:
            return json.loads(content)
        except ValueError:
            raise EndpointError(f"{self.url} returned invalid JSON: {text}") from None


def make_endpoint(config: RewardConfig, url: str, timeout_seconds: float) -> Endpoint:
    """The endpoint of a source.

    Raises:
        ConfigError: the address is invalid or would send data unencrypted over a network, or the
            environment variable of the key is not set.
    """
    where = f"rewards.{config.name}"
    parts = urllib.parse.urlsplit(url)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
        local = is_local(parts.hostname or "") and (parts.port or 1) > 0
    except ValueError:
        known = local = False
    require(known, f"{where}.path must be an address such as https://HOST/PATH, got {url}")
    require(
        parts.username is None,
        f"{where}.path contains a password; set key_variable to an environment variable",
    )
    require(
        parts.scheme == "https" or local or config.insecure,
        f"{where}.path: http:// sends prompts and keys unencrypted to {parts.hostname}; use"
        " https://, or set insecure: true within your own network",
    )
    variable = config.key_variable
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"{where}.key_variable: the environment variable {variable} is not set")
    return Endpoint(url, timeout_seconds, config.attempts, variable)


def is_local(host: str) -> bool:
    """Whether a host name or address is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def remote_scorer(config: RewardConfig, endpoint: Endpoint) -> Scorer:
    """Score all episodes of a call with one request.

    `query` has prompts with responses, `prompts` the prompts, `labels` the rows' column. The reply
    is {"rewards": [...]}, where null means no reward.
    """
    column = config.reads_column or ""

    def score(episodes: Sequence[Episode]) -> list[Outcome]:
        prompts = [prompt_text(episode.prompt) for episode in episodes]
        body = {
            "query": [p + each.response for p, each in zip(prompts, episodes, strict=True)],
            "prompts": prompts,
            "labels": [episode.extra.get(column) for episode in episodes],
        }

        try:
            reply = endpoint.post(body)
        except EndpointError as error:
            return everywhere(str(error), len(episodes))
        rewards = reply.get("rewards", reply) if isinstance(reply, dict) else reply
        return parse_outcomes(rewards, len(episodes))

    return score
