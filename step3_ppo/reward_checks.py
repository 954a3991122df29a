"""What settings of rewards and environments must be."""

from pipeline.errors import require
from step3_ppo.reward_settings import ENVIRONMENT, MODEL, RESERVED
from step3_ppo.settings import PPOSettings


def check_environment(config: PPOSettings) -> None:
    """Refuse settings of environments that contradict each other.

    Raises:
        ConfigError: one sentence that names the setting.
    """
    sources = [source for source in config.rewards if source.kind == ENVIRONMENT]
    require(len(sources) < 2, "ppo.rewards names two sources of kind environment; keep one of them")
    require(
        not sources or config.environment is not None,
        "ppo.rewards has a source of kind environment, and ppo.environment names none; set it, or"
        " remove the source",
    )
    names = [source.name for source in config.rewards]
    require(
        all(names.count(source.name) == 1 for source in sources),
        "ppo.rewards: the environment's source has the name of another one; rename one",
    )
    require(
        config.gold is None or config.gold.kind != ENVIRONMENT,
        "ppo.gold can't be of kind environment; give it weight 0 among ppo.rewards to measure it",
    )
    require(config.max_turns > 0, f"ppo.max_turns must be above 0, got {config.max_turns}")
    require(
        config.environment is None or config.inference_tp_size == 1,
        "ppo.environment takes turns with one process at a time; leave ppo.inference_tp_size at 1",
    )


def check_rewards(config: PPOSettings) -> None:
    """Refuse settings of rewards that contradict each other or what they are used with.

    Raises:
        ConfigError: one sentence that names the setting.
    """
    models = [source for source in config.rewards if source.kind == MODEL]
    require(len(models) < 2, "ppo.rewards names two sources of kind model; keep one of them")
    for source in models:
        first = source.path or config.reward.path
        require(
            first not in source.members,
            f"ppo.rewards.{source.name}.members names {first}, which is the first reward model"
            " already; remove it",
        )
    require(
        config.normalize_score or not config.reward_members,
        "ppo.rewards: members of a reward model are pooled as normalized scores; leave"
        " ppo.normalize_score on",
    )
    for source in config.rewards:
        require(
            source.name not in RESERVED,
            f"rewards.{source.name}: the metric reward_{source.name} is another figure; rename"
            " the source",
        )
    require(
        config.gold is None or config.gold.kind != MODEL,
        "ppo.gold can't be of kind model; give it weight 0 among ppo.rewards to measure it",
    )
    for name in ("reward_timeout", "reward_workers"):
        value = getattr(config, name)
        require(value > 0, f"ppo.{name} must be above 0, got {value}")
    require(
        0 <= config.max_reward_failures <= 1,
        f"ppo.max_reward_failures must lie in [0, 1], got {config.max_reward_failures}",
    )
    require(
        config.reward_combine == "sum" or config.group_size > 1,
        "ppo.reward_combine normalize_then_sum compares the responses to a prompt: set"
        " ppo.group_size to 2 or more",
    )
    for name in ("missing_eos_score", "score_clip"):
        value, usual = getattr(config, name), getattr(type(config), name)
        require(
            config.uses_reward_model or value in (None, usual),
            f"ppo.{name} is of a reward model's score, and ppo.rewards has none; what the sources"
            " give counts as it is: a source of kind length, or a function that looks at `stopped`,"
            " can make up for a missing end",
        )
