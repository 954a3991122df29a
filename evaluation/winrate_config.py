"""Settings of `python -m evaluation.winrate`."""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import require
from rewards.config import RewardConfig, check_limits, read_spec


@dataclass(frozen=True, kw_only=True)
class WinrateConfig:
    """Which models are compared, on which prompts, and by what."""

    paths: tuple[str, ...] = ()
    """Two or more model directories or Hub ids."""

    prompts: str = ""
    """Rows with the prompts: a file, directory or Hub name."""

    fields: dict[str, str] = field(default_factory=dict)
    """Column names where they differ from the usual: prompt=question."""

    judge: str = ""
    """What is asked: '{kind: model, path: OUT/step2_reward}', a reward model; file.py:function, or
    a kind as math, programs whose numbers are compared; '{kind: judge, path: https://HOST/v1,
    model: NAME}', a language model that sees both responses, in both orders."""

    limit: int | None = None
    """Prompts, from the first; null is all."""

    temperature: float = 0.0
    """Temperature of sampling; 0 takes the likeliest token."""

    max_new_tokens: int = 512
    """Longest response, in tokens."""

    batch_size: int = 32
    """Responses in a batch; changes none of them."""

    seed: int = 0
    """Seed of sampling, and of the bootstrap of the intervals."""

    timeout_seconds: float = 60.0
    """Seconds that one call of a program, or one request, may take."""

    workers: int = 2
    """Processes in which programs run."""

    max_failures: float = 0.1
    """Share of the verdicts that may fail; they are left out and counted."""

    cache_dir: Path | None = None
    """Where answers of an endpoint are kept, so that none is asked for twice."""

    output: Path = Path("winrate.json")
    """File for all figures, as JSON; replaced where it exists."""

    def __post_init__(self) -> None:
        require(len(self.paths) > 1, "--paths needs two or more models to compare, as --paths A B")
        for path in self.paths:
            require(self.paths.count(path) == 1, f"--paths names {path} twice; name it once")
        require(bool(self.prompts), "--prompts is missing: give rows with prompts")
        require(
            bool(self.judge),
            "--judge is missing: give '{kind: model, path: DIR}', file.py:function or a kind",
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
        require(
            self.source.kind != "model" or self.source.path is not None,
            "--judge model: say which one, as '{kind: model, path: OUT/step2_reward}'",
        )
        require(
            self.source.weight == 1.0,
            f"--judge: weight has no meaning for one judge, got {self.source.weight}; leave it out",
        )

    @property
    def source(self) -> RewardConfig:
        """What `judge` means."""
        return read_spec(self.judge, option="--judge")
