"""Refusing divisions of the processes that step 3 can't be run with."""

from pipeline.errors import require
from step3_ppo.settings import PPOSettings


def check_parallel(config: PPOSettings) -> None:
    """Refuse them.

    Raises:
        ConfigError: one sentence that names the setting and the mend.
    """
    parallel = config.parallel
    parallel.require_one_stage("step 3")
    require(
        parallel.micro_batches is None,
        "parallel.micro_batches belongs to the steps that learn from rows; lower"
        " micro_batch_size to have more of them",
    )
    parallel.check_model("ppo.actor", config.actor)
    if config.has_critic:
        parallel.check_model("ppo.critic", config.critic)
