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
    parts, together = parallel.parts, config.inference_tp_size
    require(
        parts is None or parts % together == 0,
        f"ppo.inference_tp_size {together} doesn't divide the {parts} parts of"
        f" parallel.arithmetic {parallel.arithmetic}, which generation adds up too; take"
        f" {parallel.tp}",
    )
