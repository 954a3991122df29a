"""Settings that contradict each other, of a method or of how processes divide the models."""

from pipeline.errors import require
from step3_ppo.needs import Needs
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
