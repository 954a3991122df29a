"""Refusing divisions of the processes that step 3 can't be run with."""

from pipeline.errors import require
from step3_ppo.settings import PPOSettings


def check_parallel(config: PPOSettings) -> None:
    """Refuse them.

    Raises:
        ConfigError: one sentence that names the setting and the mend.
    """
    parallel = config.parallel
    parallel.check_model("ppo.actor", config.actor)
    if config.has_critic:
        parallel.check_model("ppo.critic", config.critic)
    require(
        parallel.pp == 1 or config.environment is None,
        f"ppo.environment can't be used with parallel.pp {parallel.pp}, whose stages share their"
        " prompts; set parallel.pp 1",
    )
