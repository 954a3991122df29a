"""Which steps run by default, and what step 3 starts from, by what rewards its responses."""

import pytest

from pipeline.plan.request import parse_request
from pipeline.plan.resolve import resolve_run
from step3_ppo.config import PPOConfig
from tests.pipeline.stages import THREE_STEPS


def planned(*argv: str) -> tuple[tuple[int, ...], PPOConfig]:
    """The steps that run, and the settings of step 3."""
    command_line, configs = resolve_run(parse_request(argv, THREE_STEPS), THREE_STEPS)
    config = configs["step3_ppo"]
    assert isinstance(config, PPOConfig)
    return command_line.request.step, config


GROUPS = ("--ppo.advantage", "grpo", "--ppo.group_size", "8")


@pytest.mark.parametrize(
    ("argv", "steps"),
    [
        ((), (1, 2, 3)),
        (GROUPS, (1, 2, 3)),
        (("--reward", "math"), (1, 3)),
        (("--reward-function", "score.py:check", *GROUPS), (1, 3)),
        (("--reward", "math", "model"), (1, 2, 3)),
        (("--config", "embedded-grpo.yaml"), (1, 3)),
        (("--config", "arithmetic-grpo.yaml"), (1, 3)),
        (("--ppo.gold.name", "gold", "--ppo.gold.kind", "math"), (1, 2, 3)),
        (("--ppo.reward.path", "DIR", "--ppo.critic.path", "DIR"), (1, 2, 3)),
        (("--reward", "math", "--step", "3"), (3,)),
        (("--reward", "math", "--step", "1", "2", "3"), (1, 2, 3)),
    ],
)
def test_the_reward_model_is_trained_where_something_reads_it(
    argv: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    assert planned(*argv)[0] == steps


def test_without_a_reward_model_a_critic_starts_from_the_actor() -> None:
    _, alone = planned("--reward", "math", "--output-dir", "out")
    _, beside = planned("--reward", "math", "model", "--output-dir", "out")
    _, named = planned("--reward", "math", "--ppo.critic.path", "DIR")

    assert alone.critic.path == "out/step1_sft"
    assert alone.used_models().keys() == {"actor", "critic", "base"}
    assert beside.critic.path == beside.reward.path == "out/step2_reward"
    assert named.critic.path == "DIR"


def test_short_forms_stand_for_sources_with_names_of_their_own() -> None:
    _, config = planned("--reward-function", "a.py:check", "b.py:check", "--reward", "regex:^#")

    found = [(source.name, source.kind, source.path, source.pattern) for source in config.rewards]
    assert found == [
        ("check", "function", "a.py:check", ""),
        ("check_2", "function", "b.py:check", ""),
        ("regex", "regex", None, "^#"),
    ]
