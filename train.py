"""From a base language model to a chat model: supervised fine-tuning, reward model, PPO.

`python train.py` runs the three steps on the embedded default; `--help` lists the options.
"""

from collections.abc import Sequence

from pipeline import orchestrator
from pipeline.cli import run_main
from pipeline.plan.request import Stage
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig

STAGES = (
    Stage(1, "step1_sft", "sft", SFTConfig, "step1_sft.train"),
    Stage(2, "step2_reward", "reward", RewardConfig, "step2_reward.train"),
    Stage(3, "step3_ppo", "ppo", PPOConfig, "step3_ppo.train"),
)


def main(argv: Sequence[str]) -> None:
    """Hand the command line and the three steps to the orchestrator."""
    orchestrator.main(argv, STAGES)


if __name__ == "__main__":
    run_main(main)
