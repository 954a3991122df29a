"""How answers are drawn."""

import argparse
from dataclasses import dataclass, fields

from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn from a model."""

    max_new_tokens: int = 128
    """Longest answer, in tokens."""

    min_new_tokens: int = 0
    """Shortest answer, in tokens: until then the tokens that end one are not chosen."""

    temperature: float = 0.7
    """Divides the logits before sampling; 0 takes the likeliest token (greedy)."""

    top_k: int | None = None
    """Sample from that many of the likeliest tokens; null is all."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability (nucleus sampling)."""

    min_p: float = 0.0
    """Sample from tokens at least this share as likely as the likeliest one."""

    repetition_penalty: float = 1.0
    """Divides logits above 0 of tokens that were there before and multiplies those below; 1 is
    off."""

    seed: int = 0
    """The same seed gives the same answers."""

    def __post_init__(self) -> None:
        require(self.max_new_tokens > 0, f"max_new_tokens must be above 0: {self.max_new_tokens}")
        require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens must lie in [0, max_new_tokens]: {self.min_new_tokens}",
        )
        require(self.temperature >= 0, f"temperature must be 0 or above: {self.temperature}")
        require(0 < self.top_p <= 1, f"top_p must lie in (0, 1]: {self.top_p}")
        require(self.top_k is None or self.top_k > 0, f"top_k must be above 0: {self.top_k}")
        require(0 <= self.min_p <= 1, f"min_p must lie in [0, 1]: {self.min_p}")
        require(
            self.repetition_penalty > 0,
            f"repetition_penalty must be above 0: {self.repetition_penalty}",
        )


def add_options(
    parser: argparse.ArgumentParser, *, max_new_tokens: int, temperature: float
) -> None:
    """Give a command line the settings of `Sampling` except the seed, with these defaults."""

    def add(
        name: str, kind: type[int] | type[float], help_text: str, default: int | float | None
    ) -> None:
        flag = f"--{name.replace('_', '-')}"
        flags = (flag, f"--{name}") if "_" in name else (flag,)
        metavar = "N" if kind is int else "X"
        parser.add_argument(*flags, type=kind, default=default, metavar=metavar, help=help_text)

    add("max_new_tokens", int, f"longest answer; default {max_new_tokens}", max_new_tokens)
    add("min_new_tokens", int, "shortest answer; default 0", 0)
    add("temperature", float, f"0 is greedy; default {temperature:g}", temperature)
    add("top_k", int, "sample from the N likeliest tokens; default all", None)
    add("top_p", float, "nucleus sampling; default 1", 1.0)
    add("min_p", float, "least share of the likeliest token's probability; default 0", 0.0)
    add("repetition_penalty", float, "above 1 disfavours tokens that were there; default 1", 1.0)


def sampling_of(options: argparse.Namespace, *, seed: int) -> Sampling:
    """The settings that the command line gave."""
    names = [field.name for field in fields(Sampling) if field.name != "seed"]
    return Sampling(seed=seed, **{name: getattr(options, name) for name in names})
