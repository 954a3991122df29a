"""Checks of the settings of step 3 that involve several of them."""

from pipeline.system.errors import require
from step3_ppo.methods import Needs
from step3_ppo.reward_settings import ENVIRONMENT, MODEL, RESERVED
from step3_ppo.settings import PPOSettings


def check_method(config: PPOSettings, needs: Needs) -> None:
    """Refuse estimators, losses, groups and penalties that don't go together.

    Raises:
        ConfigError: the sentence names the setting and what to change.
    """
    _check_groups(config, needs)
    _check_critic(config, needs)
    _check_losses(config)
    _check_kl(config)
    _check_overlong(config)


def _check_groups(config: PPOSettings, needs: Needs) -> None:
    require(
        config.rollout_size % config.group_size == 0,
        f"ppo.group_size {config.group_size} doesn't divide ppo.rollout_size {config.rollout_size}:"
        " a rollout holds all responses to each of its prompts",
    )
    grouped = config.group_size > 1
    require(
        not needs.group or grouped,
        f"ppo.advantage {config.advantage} compares the responses to a prompt: set ppo.group_size"
        " to 2 or more",
    )
    require(
        config.baseline == "none" or config.advantage == "reinforce_pp",
        f"ppo.baseline {config.baseline} is of ppo.advantage reinforce_pp; {config.advantage} has a"
        " baseline of its own",
    )
    require(
        config.baseline == "none" or grouped,
        "ppo.baseline group is the mean of the responses to a prompt: set ppo.group_size to 2 or"
        " more",
    )
    require(
        config.baseline == "none" or not config.whiten_rewards,
        "ppo.whiten_rewards changes the unit of rewards, and ppo.baseline group takes scores off"
        " them; omit one",
    )
    require(
        config.dynamic_sampling >= 0,
        f"ppo.dynamic_sampling must not be below 0, got {config.dynamic_sampling}",
    )
    require(
        config.dynamic_sampling == 0 or grouped,
        "ppo.dynamic_sampling replaces prompts whose responses have the same reward: set"
        " ppo.group_size to 2 or more",
    )


def _check_critic(config: PPOSettings, needs: Needs) -> None:
    require(
        needs.discount or config.gamma == 1,
        f"ppo.gamma {config.gamma} discounts the returns that a critic learns, and ppo.advantage"
        f" {config.advantage} sums a response's rewards as they are; leave it at 1",
    )
    require(
        needs.critic or config.critic_warmup_steps == 0,
        f"ppo.critic_warmup_steps trains the critic alone, and ppo.advantage {config.advantage}"
        " has none; leave it at 0",
    )
    for name in ("lam_value", "lam_length_alpha"):
        require(
            needs.critic or getattr(config, name) is None,
            f"ppo.{name} is a trade-off of ppo.advantage gae, and {config.advantage} has none;"
            " leave it at null",
        )


def _check_losses(config: PPOSettings) -> None:
    require(
        config.loss != "none"
        or (config.ppo_epochs == 1 and config.batch_size == config.rollout_size),
        "ppo.loss none is right for the policy that was sampled, so for one update on each"
        " rollout: set ppo.ppo_epochs 1 and ppo.batch_size to ppo.rollout_size, or ppo.loss"
        " clip",
    )
    require(
        config.loss != "cispo" or config.dual_clip is None,
        "ppo.dual_clip bounds a clipped loss, and ppo.loss cispo bounds the ratio; leave it at"
        " null",
    )
    require(
        config.correction_cap >= 1,
        f"ppo.correction_cap must be at least 1, got {config.correction_cap}: below it a policy"
        " that is not off would be corrected",
    )
    require(
        config.correction_threshold >= 0,
        f"ppo.correction_threshold must be at least 0, got {config.correction_threshold}",
    )
    require(
        config.positive_nll_coef >= 0,
        f"ppo.positive_nll_coef must not be below 0, got {config.positive_nll_coef}",
    )


def _check_kl(config: PPOSettings) -> None:
    estimator = config.kl_estimator
    require(
        not (config.kl_in == "loss" and estimator == "k1"),
        "ppo.kl_estimator k1 in the loss has an expected gradient of 0 and holds nothing: take"
        " k3_is or k2, or set ppo.kl_in reward",
    )
    require(
        not (config.kl_in == "reward" and estimator in ("k2", "k3", "k3_is")),
        f"ppo.kl_estimator {estimator} belongs in the loss, and ppo.kl_in is reward, where k1"
        " alone has the gradient of the KL: set ppo.kl_in loss, or leave it at auto",
    )
    require(
        config.kl_target is None or config.kl_in != "none",
        "ppo.kl_target steers a KL penalty, and ppo.kl_in none leaves it out: set reward or loss",
    )


def _check_overlong(config: PPOSettings) -> None:
    buffer = config.overlong_buffer
    require(
        0 <= buffer <= config.max_new_tokens,
        f"ppo.overlong_buffer must lie between 0 and ppo.max_new_tokens {config.max_new_tokens},"
        f" got {buffer}",
    )
    name = "ppo.overlong mask" if config.overlong == "mask" else f"ppo.overlong_buffer {buffer:g}"
    masks = config.overlong == "mask"
    require(
        not (masks and buffer > 0),
        "ppo.overlong mask leaves responses without an end out, and ppo.overlong_buffer takes off"
        " their reward: choose one",
    )
    require(
        not (
            (masks or buffer > 0)
            and config.uses_reward_model
            and config.missing_eos_score is not None
        ),
        f"{name} decides what a response without an end counts, and so does"
        f" ppo.missing_eos_score {config.missing_eos_score}: set that to null",
    )


def check_parallel(config: PPOSettings) -> None:
    """Refuse divisions of the processes that step 3 can't be run with.

    Raises:
        ConfigError: the sentence names the setting and what to change.
    """
    parallel = config.parallel
    parallel.check_model("ppo.actor", config.actor)
    if config.has_critic:
        parallel.check_model("ppo.critic", config.critic)


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
