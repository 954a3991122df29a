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
    """Settings of the server: models, address and limits."""

    path: tuple[str, ...] = ()
    """Model directories or Hub ids, optionally with a name, as in sft=OUT/step1_sft."""

    run: Path | None = None
    """Output directory of a run; its base model and those of steps 0, 1 and 3 are served."""

    reward: str | None = None
    """Reward model for /v1/score, such as OUT/step2_reward; null uses the one in --run, if any."""

    ratings: Path | None = None
    """File to append ratings to; null uses OUT/ratings.jsonl with --run, and otherwise no file."""

    host: str = "127.0.0.1"
    """Address to listen on; addresses other than loopback require an API key."""

    port: int = 8000
    """Port to listen on; 0 uses any free port."""

    threads: int | None = None
    """Number of CPU threads; null uses RLHF_THREADS, or one per core if that is not set."""

    precision: Precision = "auto"
    """Data type of the weights: auto (bf16 on a GPU that supports it, otherwise fp32), fp32, bf16
    or fp16."""

    slots: int | None = None
    """Number of concurrent sequences per model; null uses as many as fit, up to 32."""

    context: int | None = None
    """Maximum tokens in prompt and response; null uses up to 8,192, as model and memory allow."""

    cache_gib: float | None = None
    """Memory for all keys and values, in GiB; null uses half of what the weights leave free."""

    prefix_reuse: Literal["client", "all", "off"] = "client"
    """Clients whose keys and values a prompt with a common prefix may reuse: client (only those
    with the same key or address), all, or off."""

    prefill_chunk: int | None = None
    """Maximum prompt tokens processed between two tokens of running responses; null uses 64 on a
    CPU and 512 on a GPU."""

    queue: int = 256
    """Maximum number of requests waiting for a slot; further ones are rejected with status 429."""

    queue_seconds: float = 60.0
    """Maximum time in seconds that a request waits for a slot."""

    request_seconds: float = 600.0
    """Maximum duration of a request in seconds."""

    idle_seconds: float = 30.0
    """Seconds until a client that doesn't read its stream or finish its request is disconnected."""

    drain_seconds: float = 20.0
    """Maximum time in seconds for running requests to finish after SIGTERM."""

    max_body_mib: float = 2.0
    """Maximum size of a request body in MiB."""

    max_tokens_default: int = 512
    """Maximum tokens per response if the request doesn't set a limit."""

    max_n: int = 16
    """Maximum number of responses per prompt."""

    api_key: tuple[str, ...] = ()
    """API keys; each request must send one. RLHF_API_KEY adds a key. Prefer a file, because other
    users can read the command line."""

    api_key_file: Path | None = None
    """File of keys, one per line, as KEY or NAME KEY; names appear in the log."""

    insecure_no_key: bool = False
    """Allow a non-loopback host without a key; anyone who can reach the port can use the models."""

    page: bool = True
    """Serve the web page to chat, compare and rate."""

    log_requests: bool = True
    """Log the client, path, status and duration of each request, but no text."""

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
            require(value is None or value > 0, f"{name} must be positive, got {value}")
        require(
            self.drain_seconds >= 0, f"drain_seconds must be at least 0, got {self.drain_seconds}"
        )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK


def read_keys(config: ServeConfig) -> dict[str, str]:
    """Return the API keys by their names in the log, or {} if no key is required.

    Raises:
        ConfigError: the file can't be read or has no keys, a key is invalid, or a required key is
            missing.
    """
    values = [*config.api_key, *filter(None, [os.environ.get("RLHF_API_KEY")])]
    keys = {f"key {number}": key for number, key in enumerate(values, start=1)}
    if config.api_key_file is not None:
        keys |= _read_key_file(config.api_key_file)
    for name, key in keys.items():
        require(len(key) >= 8, f"--api-key: {name} is shorter than 8 characters; use a longer one")
        require(
            key.isascii() and key.isprintable() and " " not in key,
            f"--api-key: {name} has characters that are invalid in headers; use letters and digits",
        )
    if not config.is_local and not keys and not config.insecure_no_key:
        raise ConfigError(
            f"--host {config.host} lets other machines connect; pass --api-key-file FILE, or"
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
