"""The held-out prompts of step 3."""

import json
from pathlib import Path

from pipeline.config import DataConfig, FrozenModelConfig
from pipeline.models.hf.chat import load_chat
from step3_ppo.config import PPOConfig
from step3_ppo.evaluate import estimate_evaluation_cost
from step3_ppo.rollout import load_prompts


def write_rows(path: Path, prompts: list[str]) -> str:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(path)


def test_too_long_prompts_are_replaced_by_others(tmp_path: Path) -> None:
    long = [f"{number} {'is much too long ' * 40}" for number in range(8)]
    data = DataConfig(
        path=(write_rows(tmp_path / "rows.jsonl", [f"Add {number}." for number in range(40)]),),
        eval_path=(
            write_rows(tmp_path / "eval.jsonl", [*long, *(f"Take {n}." for n in range(8))]),
        ),
        max_eval_rows=8,
    )
    config = PPOConfig(data=data, max_prompt_length=48, rollout_size=8, batch_size=8)

    held_out = load_prompts(load_chat(FrozenModelConfig(path="embedded"), data), config).held_out

    texts = {prompt.messages[0].content for prompt in held_out}
    assert texts == {f"Take {number}." for number in range(8)}


def test_evaluation_cost_matches_hand_computed_values() -> None:
    ppo = PPOConfig(rollout_size=64, batch_size=64, ppo_epochs=2)  # two models learn, two score
    rloo = PPOConfig(rollout_size=64, batch_size=64, ppo_epochs=1, advantage="rloo", group_size=4)

    assert estimate_evaluation_cost(32, ppo) == 32 / 64 * (4 + 4) / (4 + 4 + 12)
    assert estimate_evaluation_cost(64, rloo) == (4 + 3) / (4 + 3 + 3)
