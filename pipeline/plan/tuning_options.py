"""The options of autotuning."""

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import require


@dataclass(frozen=True, kw_only=True)
class Autotuning:
    """The options of autotuning."""

    autotune: Literal["tune", "run"] | None = None
    """Find fast settings that fit, by short timed trials, each a real run: the micro-batch is
    doubled until that stops paying, then recomputation and ZeRO stages are tried. tune writes them
    to autotune/best.yaml of the output directory and stops, run continues with them."""

    autotune_steps: int = 4
    """Optimizer steps that a trial measures (iterations in step 3), after 2 that don't count."""

    def __post_init__(self) -> None:
        require(
            self.autotune is not None or self.autotune_steps == Autotuning.autotune_steps,
            "--autotune-steps needs --autotune tune or --autotune run",
        )
        require(
            self.autotune_steps > 0, f"--autotune-steps must be above 0, got {self.autotune_steps}"
        )
