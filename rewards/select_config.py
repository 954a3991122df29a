"""Settings of `python -m rewards.select`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.errors import require
from rewards.config import RewardConfig, check_limits
from rewards.spec import read_spec


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Which answers are sampled, what scores them and what is written."""

    path: str = ""
    """Model that answers: a directory, such as OUT/step1_sft, or Hub id."""

    prompts: str = ""
    """Rows with the prompts: a file, directory or Hub name, or `embedded`."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names where they differ from the usual: prompt=question."""

    reward: tuple[str, ...] = ()
    """Sources of rewards: file.py:function (--reward-function), a kind (math, verifier, ...), or
    all settings, '{kind: model, path: OUT/step2_reward}' for a reward model."""

    best_of: int = 16
    """Answers to each prompt."""

    write: Literal["demonstrations", "pairs"] = "demonstrations"
    """demonstrations: the best answer to each prompt, for step 1; pairs: the best and the worst,
    for step 2."""

    output: Path = Path("selected.jsonl")
    """File for the rows; replaced where it exists."""

    min_reward: float | None = None
    """Choose no answer of a lower reward; null takes the best, however bad it is."""

    limit: int | None = None
    """Prompts, from the first; null is all."""

    temperature: float = 1.0
    """Temperature of sampling, above 0."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""

    max_new_tokens: int = 256
    """Longest answer, in tokens; one that is cut off there is never chosen."""

    batch_size: int = 32
    """Answers in a batch; changes none of them."""

    seed: int = 0
    """The same seed draws the same answers."""

    timeout_seconds: float = 10.0
    """Seconds that one call of a source may take; a longer one has failed."""

    workers: int = 2
    """Processes in which programs compute rewards."""

    max_failures: float = 0.1
    """Share of the answers on which a source may fail."""

    cache_dir: Path | None = None
    """Where answers of endpoints are kept, so that none is asked for twice."""

    def __post_init__(self) -> None:
        require(bool(self.path), "--path is missing: give the model that answers")
        require(bool(self.prompts), "--prompts is missing: give rows with prompts")
        require(bool(self.reward), "--reward is missing: give file.py:function, or a kind as math")
        require(self.best_of > 1, f"--best-of must be 2 or more, got {self.best_of}")
        require(
            self.temperature > 0,
            f"--temperature must be above 0, got {self.temperature}: without chance all"
            f" {self.best_of} answers are one",
        )
        for name in ("limit", "max_new_tokens", "batch_size"):
            value = getattr(self, name)
            option = name.replace("_", "-")
            require(value is None or value > 0, f"--{option} must be above 0, got {value}")
        check_limits(
            timeout_seconds=self.timeout_seconds,
            workers=self.workers,
            max_failures=self.max_failures,
        )

    @property
    def sources(self) -> list[RewardConfig]:
        """What scores the answers, in the order of the command line."""
        found: list[RewardConfig] = []
        for spec in self.reward:
            found.append(read_spec(spec, [each.name for each in found]))
        for source in found:
            require(
                source.kind != "model" or source.path is not None,
                "--reward model: say which one, as '{kind: model, path: OUT/step2_reward}'",
            )
            require(
                not source.members,
                f"--reward {source.name}: step 3 alone pools the members of a reward model; name"
                " each model as a source, whose scores are summed by weight",
            )
        return found
