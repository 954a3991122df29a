"""Default steps for different sources of rewards."""

import pytest

from pipeline.plan.request import parse_request
from pipeline.plan.resolve import resolve_run
from tests.pipeline.stages import THREE_STEPS

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
def test_reward_model_is_trained_only_if_it_is_needed(
    argv: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    command_line, _ = resolve_run(parse_request(argv, THREE_STEPS), THREE_STEPS)

    assert command_line.request.step == steps
