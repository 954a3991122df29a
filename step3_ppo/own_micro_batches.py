"""How a process cuts its responses into micro-batches."""

from collections.abc import Sequence

from pipeline.data.batches import local_micro_batches
from step3_ppo.config import PPOConfig


def own_micro_batches(config: PPOConfig, lengths: Sequence[int]) -> list[list[int]]:
    """Of this process's rows, by number, as many as on every process; some may be empty.

    Args:
        config: settings of the step.
        lengths: tokens of each row.
    """
    return local_micro_batches(
        lengths,
        max_tokens=config.micro_batch_size * config.max_length,
        at_least=config.least_micro_batches,
    )
