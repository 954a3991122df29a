"""From a base language model to a chat model: supervised fine-tuning, reward model, PPO or DPO.

`python train.py` runs the three steps on the embedded default; `--step 0` continues pre-training
before them; `--help` lists the options.
"""

from collections.abc import Sequence

from pipeline.cli.options import run_main
from pipeline.plan.stage import BEFORE, Stage
from pipeline.run import orchestrator
from step0_pretrain.config import PretrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig
from step3_preference.config import PreferenceConfig

STAGES = (
    Stage(
        0,
        "step0_pretrain",
        "pretrain",
        PretrainConfig,
        "step0_pretrain.train",
        models={"model": BEFORE},
        options={"model": "actor"},
        by_choice=True,
    ),
    Stage(
        1,
        "step1_sft",
        "sft",
        SFTConfig,
        "step1_sft.train",
        models={"model": "pretrain"},
        options={"model": "actor"},
    ),
    Stage(
        2,
        "step2_reward",
        "reward",
        RewardConfig,
        "step2_reward.train",
        models={"model": "sft", "actor": "sft"},
        options={"model": "reward"},
    ),
    Stage(
        3,
        "step3_ppo",
        "ppo",
        PPOConfig,
        "step3_ppo.train",
        models={"actor": "sft", "critic": "reward", "reward": "reward", "base": BEFORE},
        options={"actor": "actor", "critic": "reward"},
        without={"critic": "sft"},
    ),
    Stage(
        3,
        "step3_dpo",
        "preference",
        PreferenceConfig,
        "step3_preference.train",
        models={"model": "sft", "reward": "reward", "base": BEFORE},
        options={"model": "actor"},
        begins={"orpo": {"model": BEFORE}},
        optional=frozenset({"reward"}),
        takes_shares=True,
        own_directories=True,
    ),
)


def main(argv: Sequence[str]) -> None:
    """Hand the command line and the steps to the orchestrator."""
    orchestrator.main(argv, STAGES)


if __name__ == "__main__":
    run_main(main)
