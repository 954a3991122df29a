"""HTTP endpoints: JSON POST requests with retries, and remote reward services."""

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
from rewards.contract import Episode, Outcome, Scorer, fail_all, parse_outcomes
from rewards.functions import prompt_text

INITIAL_BACKOFF = 0.5
"""Mean seconds before the second attempt; doubled for each further attempt."""

MAX_BACKOFF = 30.0
"""Maximum seconds between attempts, even if a server's Retry-After is longer."""

MAX_REPLY_BYTES = 16 << 20
"""Maximum bytes of a server's reply."""

_RETRYABLE_STATUSES = {408, 425, 429, 500, 502, 503, 504}


class EndpointError(Exception):
    """An endpoint returned no usable reply."""


class _TransientError(EndpointError):
    """An error that a retry may resolve."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Endpoint:
    """URL and limits of an endpoint."""

    url: str
    timeout_seconds: float
    """Maximum seconds per request."""

    attempts: int
    key_variable: str | None

    def post(self, body: object) -> Any:  # noqa: ANN401
        """Send JSON and return the JSON of the reply.

        Raises:
            EndpointError: the last attempt failed, or an error occurred that a retry won't fix.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return self._post_once(json.dumps(body).encode())
            except _TransientError as error:
                if attempt == self.attempts:
                    suffix = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise EndpointError(f"{error}{suffix}") from None
                backoff = INITIAL_BACKOFF * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
                pause = backoff if error.retry_after is None else error.retry_after
                time.sleep(min(MAX_BACKOFF, pause))
        raise AssertionError

    @property
    def max_total_seconds(self) -> float:
        """Maximum seconds for all attempts, with the longest pauses between them."""
        return self.attempts * self.timeout_seconds + (self.attempts - 1) * MAX_BACKOFF

    def _post_once(self, body: bytes) -> Any:  # noqa: ANN401
        parts = urllib.parse.urlsplit(self.url)
        uses_tls = parts.scheme == "https"
        connection_class = http.client.HTTPSConnection if uses_tls else http.client.HTTPConnection
        connection = connection_class(
            parts.hostname or "", parts.port, timeout=self.timeout_seconds
        )
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self.key_variable, '')}"
        try:
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            content = response.read(MAX_REPLY_BYTES + 1)
        except TimeoutError:
            raise _TransientError(
                f"{self.url} did not reply within {self.timeout_seconds:g} s"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise _TransientError(f"{self.url} can't be reached: {reason}") from None
        finally:
            connection.close()
        return self._parse_reply(response, content)

    def _parse_reply(self, response: http.client.HTTPResponse, content: bytes) -> Any:  # noqa: ANN401
        status_line = f"{self.url} returned {response.status} {response.reason}"
        if response.status in _RETRYABLE_STATUSES:
            try:
                retry_after = max(0.0, float(response.getheader("Retry-After") or ""))
            except ValueError:  # missing, or a date, which is ignored since clocks differ
                retry_after = None
            raise _TransientError(status_line, retry_after)
        text = " ".join(content[:200].decode(errors="replace").split())
        if response.status != 200:
            raise EndpointError(f"{status_line}: {text}")
        if len(content) > MAX_REPLY_BYTES:
            raise EndpointError(f"{self.url} returned more than {MAX_REPLY_BYTES >> 20} MiB")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise EndpointError(f"{self.url} returned invalid JSON: {text}") from None


def make_endpoint(config: RewardConfig, url: str, timeout_seconds: float) -> Endpoint:
    """Return the endpoint of a source.

    Raises:
        ConfigError: the URL is invalid, data would be sent unencrypted over a network, or the API
            key's environment variable is not set.
    """
    where = f"rewards.{config.name}"
    parts = urllib.parse.urlsplit(url)
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_loopback = is_local(parts.hostname or "") and (parts.port or 1) > 0
    except ValueError:
        is_valid = is_loopback = False
    require(is_valid, f"{where}.path must be a URL such as https://HOST/PATH, got {url}")
    require(
        parts.username is None,
        f"{where}.path contains credentials; name an environment variable in key_variable instead",
    )
    require(
        parts.scheme == "https" or is_loopback or config.insecure,
        f"{where}.path: http:// sends prompts and keys unencrypted to {parts.hostname}; use"
        " https://, or set insecure: true within your own network",
    )
    variable = config.key_variable
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"{where}.key_variable: the environment variable {variable} is not set")
    return Endpoint(url, timeout_seconds, config.attempts, variable)


def is_local(host: str) -> bool:
    """Return whether a host name or address refers to this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def remote_scorer(config: RewardConfig, endpoint: Endpoint) -> Scorer:
    """Return a scorer that scores all episodes of a call with one request.

    The request contains `query` (prompts with their responses), `prompts`, and `labels` (values of
    the source's column). The reply is {"rewards": [...]}, where null means no reward.
    """

    def score(episodes: Sequence[Episode]) -> list[Outcome]:
        prompts = [prompt_text(episode.prompt) for episode in episodes]
        body = {
            "query": [p + episode.response for p, episode in zip(prompts, episodes, strict=True)],
            "prompts": prompts,
            "labels": [episode.extra.get(config.resolved_column) for episode in episodes],
        }
        try:
            reply = endpoint.post(body)
        except EndpointError as error:
            return fail_all(str(error), len(episodes))
        rewards = reply.get("rewards", reply) if isinstance(reply, dict) else reply
        return parse_outcomes(rewards, len(episodes))

    return score
