"""The numbers of a step's batches: rows, lengths, how many at once."""

from dataclasses import dataclass
from typing import Any

from pipeline.config import StepConfig

ANSWERS = 64
"""Sequences that step 2 answers at once, as `inference.generation` does by default."""


@dataclass(frozen=True)
class Shape:
    """How a step's work is cut among its processes, at its largest.

    Settings that steps alone have are read by name: this package does not import steps.
    """

    config: StepConfig

    section: str
    """The step's name in files of settings: sft, reward or ppo."""

    world: int
    """Processes."""

    @property
    def _said(self) -> Any:  # noqa: ANN401
        return self.config

    @property
    def share(self) -> int:
        """Rows of an optimizer step that one process has."""
        return -(-self.config.batch_size // self.world)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return min(self.config.micro_batch_size, self.share)

    @property
    def sequences(self) -> int:
        """Sequences of a micro-batch: a pair has two."""
        return 2 * self.rows if self.section == "reward" else self.rows

    @property
    def micro_batches(self) -> int:
        """Of a process in an optimizer step."""
        return -(-self.share // self.rows)

    def passes(self, role: str) -> int:
        """Backward passes of a model in an optimizer step."""
        return self.micro_batches * (2 if self.has_ptx and role == "actor" else 1)

    @property
    def reuses_forward(self) -> bool:
        """Whether models learn from the passes that scored a rollout, which wait for each other."""
        return self.section == "ppo" and self._said.reuses_forward(processes=self.world)

    @property
    def has_ptx(self) -> bool:
        """Whether the actor also learns from texts, in passes of their own."""
        return self.section == "ppo" and self._said.ptx_coef > 0

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self._said.max_length if self.section == "ppo" else self.config.data.max_length

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt."""
        return self._said.max_prompt_length if self.section == "ppo" else self.length

    @property
    def targets(self) -> int:
        """Tokens of a sequence that a loss may count, at most."""
        return self._said.max_new_tokens if self.section == "ppo" else self.length - 1

    @property
    def new_tokens(self) -> int:
        """Tokens of the longest answer; 0 in a step without answers."""
        return 0 if self.section == "sft" else self._said.max_new_tokens

    @property
    def tensor_parallel(self) -> int:
        """Processes that generate together."""
        return self._said.inference_tp_size if self.section == "ppo" else 1

    @property
    def slots(self) -> int:
        """Sequences that a process answers at once, where there is room for so many."""
        if self.section == "reward":
            return min(ANSWERS, -(-self._said.normalization_prompts // self.world))
        return min(self._said.generation_batch_size, self.answers)

    @property
    def answers(self) -> int:
        """Answers of a rollout that a process computes, alone or with those beside it."""
        return -(-self._said.rollout_size // self.world) * self.tensor_parallel

    @property
    def averages(self) -> bool:
        """Whether a moving average of the actor is kept."""
        return self.section == "ppo" and self._said.ema_decay is not None

    def keeps_best(self, role: str) -> bool:
        """Whether the best weights so far of a model that learns are kept."""
        return self.config.keep_best and role != "critic"

    @property
    def naps(self) -> bool:
        """Whether the optimizer's state leaves the GPU while answers are generated."""
        return self.section == "ppo" and self._said.offload_in_generation

    @property
    def keeps_replica(self) -> bool:
        """Whether what generates stays in memory while the models train."""
        return self.section == "ppo" and self._said.replica == "resident"

    @property
    def temperature(self) -> float:
        """By which logits are divided."""
        return self._said.temperature if self.section == "ppo" else 1.0

    @property
    def counts_entropy(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return self.section == "ppo" and self._said.entropy_coef > 0
