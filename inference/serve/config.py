"""Settings and API keys of `python -m inference.serve`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.config import Precision
from pipeline.system.errors import ConfigError, require

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine can reach."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Models, address and limits of the server."""

    path: tuple[str, ...] = ()
    """Models: directories or Hub names, optionally named as in sft=OUT/step1_sft."""

    run: Path | None = None
    """A run's output directory: serves base, step 1 and step 3, if present."""

    reward: str | None = None
    """Reward model, such as OUT/step2_reward, for /v1/score; --run finds its own."""

    ratings: Path | None = None
    """File to which ratings are appended; null uses OUT/ratings.jsonl with --run, else none."""

    host: str = "127.0.0.1"
    """Address to listen on; addresses other than loopback need a key."""

    port: int = 8000
    """Port to listen on; 0 uses any free port."""

    threads: int | None = None
    """CPU threads; null uses RLHF_THREADS, else one per core."""

    precision: Precision = "auto"
    """Data type of the weights: auto (bf16 on a GPU that supports it, else fp32), fp32, bf16,
    fp16."""

    slots: int | None = None
    """Concurrent sequences per model; null uses as many as fit, at most 32."""

    context: int | None = None
    """Maximum tokens per sequence, prompt and response; null uses the model's, at most 8,192."""

    cache_gib: float | None = None
    """Memory for keys and values of all models; null uses half of what the weights leave free."""

    prefix_reuse: Literal["client", "all", "off"] = "client"
    """Clients whose keys and values a prompt may reuse for a common prefix: client (the same key or
    address), all, off."""

    prefill_chunk: int | None = None
    """Maximum prompt tokens read between two tokens of running responses; null uses 64 on a CPU,
    512 on a GPU."""

    queue: int = 256
    """Maximum requests that wait for a slot; further ones are refused with 429."""

    queue_seconds: float = 60.0
    """Maximum seconds that a request waits for a slot."""

    request_seconds: float = 600.0
    """Maximum duration of a request in seconds."""

    idle_seconds: float = 30.0
    """Seconds that a client may leave its stream unread, or a request unfinished."""

    drain_seconds: float = 20.0
    """Seconds for running requests to end after SIGTERM."""

    max_body_mib: float = 2.0
    """Maximum size of a request body in MiB."""

    max_tokens_default: int = 512
    """Maximum tokens per response if a request gives no length."""

    max_n: int = 16
    """Maximum responses per prompt."""

    api_key: tuple[str, ...] = ()
    """API keys, one of which each request must have; RLHF_API_KEY gives one too. Prefer a file:
    other users can read a command line."""

    api_key_file: Path | None = None
    """File of keys, one per line, as KEY or NAME KEY; names appear in the log."""

    insecure_no_key: bool = False
    """Listen on other addresses without a key: anyone who reaches the port can use the models."""

    cors: tuple[str, ...] = ()
    """Origins of other pages that may use the API, such as https://example.org."""

    page: bool = True
    """Serve the page to chat, compare and rate."""

    log_requests: bool = True
    """Write a log line for each request, with client, path, status and seconds, without texts."""

    tls_cert: Path | None = None
    """Certificate for serving https."""

    tls_key: Path | None = None
    """Private key of the certificate."""

    def __post_init__(self) -> None:
        require(
            bool(self.path or self.run),
            "--path is missing: pass a model directory, or --run OUT for the models of a run",
        )
        require(0 <= self.port < 65536, f"port must be in [0, 65535], got {self.port}")
        for name in (
            *("slots", "context", "cache_gib", "prefill_chunk", "queue", "queue_seconds"),
            *("request_seconds", "idle_seconds", "max_body_mib", "max_tokens_default", "max_n"),
        ):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be above 0, got {value}")
        require(
            self.drain_seconds >= 0, f"drain_seconds must not be below 0, got {self.drain_seconds}"
        )
        require(
            (self.tls_cert is None) == (self.tls_key is None),
            "tls_cert and tls_key must be set together",
        )
        for origin in self.cors:
            require(
                origin.startswith(("http://", "https://")) and origin.count("/") == 2,
                f"cors must be origins, such as https://example.org, got {origin}",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK


def read_keys(config: ServeConfig) -> dict[str, str]:
    """API keys by their name in the log; empty if no key is required.

    Raises:
        ConfigError: the file can't be read or has no keys, a key is too short, or the server would
            be open to others without one.
    """
    values = [*config.api_key, *filter(None, [os.environ.get("RLHF_API_KEY")])]
    keys = {f"key {number}": key for number, key in enumerate(values, start=1)}
    if config.api_key_file is not None:
        keys |= _read_key_file(config.api_key_file)
    for name, key in keys.items():
        require(len(key) >= 8, f"--api-key: {name} is shorter than 8 characters; use a longer one")
        require(
            key.isascii() and key.isprintable() and " " not in key,
            f"--api-key: {name} has characters that headers forbid; use letters and digits",
        )
    if not config.is_local and not keys and not config.insecure_no_key:
        raise ConfigError(
            f"--host {config.host} accepts other machines; pass --api-key-file FILE, or"
            " --insecure-no-key to serve without a key"
        )
    return keys


def _read_key_file(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file {path} can't be read: {reason}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        fields: Sequence[str] = line.split()
        if not fields or line.lstrip().startswith("#"):
            continue
        require(len(fields) <= 2, f"--api-key-file {path} line {number} must be KEY or NAME KEY")
        keys[fields[0] if len(fields) == 2 else f"{path.name} line {number}"] = fields[-1]
    require(bool(keys), f"--api-key-file {path} has no keys; write one per line")
    return keys
