"""The options that say how the fastest settings are looked for."""

from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class Autotuning:
    """The options of autotuning."""

    autotune: Literal["tune", "run"] | None = None
    """Find the fastest settings that fit, by short timed trials, each a real run in processes of
    its own: tune writes them to autotune/best.yaml of the output directory and stops, run goes on
    with them. The same command again goes on with a tuning that was cut off."""

    autotune_strategy: Literal["model", "grid", "random"] = "model"
    """What is tried next: model fits the speed of what was tried and takes the most promising, grid
    takes all in the order of DeepSpeed's order, random draws by the seed."""

    autotune_trials: int | None = None
    """Trials of each step at most. Without it a third of the candidates, but no more than 24; with
    grid, all."""

    autotune_steps: int = 4
    """Optimizer steps that a trial measures (iterations in step 3), after 2 that don't count."""

    autotune_minutes: float = 30.0
    """A trial that has not ended by then is ended, and is none to choose."""

    autotune_space: dict[str, str] = field(default_factory=dict)
    """Values to try in place of the usual ones: micro_batch_size=1,2,4 zero_stage=0,2
    offload=none,optimizer+params. Any setting that leaves the result of a run as it is may be
    named; one value fixes it."""

    def __post_init__(self) -> None:
        given = [
            name
            for name, changed in (
                ("strategy", self.autotune_strategy != "model"),
                ("trials", self.autotune_trials is not None),
                ("steps", self.autotune_steps != Autotuning.autotune_steps),
                ("minutes", self.autotune_minutes != Autotuning.autotune_minutes),
                ("space", bool(self.autotune_space)),
            )
            if changed
        ]
        require(
            self.autotune is not None or not given,
            f"--autotune-{' '.join(given[:1])} needs --autotune tune or --autotune run",
        )
        for name in ("autotune_trials", "autotune_steps", "autotune_minutes"):
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            require(value is None or value > 0, f"{option} must be above 0, got {value}")
