"""Environments for tests of episodes, and an actor that ends its turns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.held_out import Prompt
from pipeline.config import TrainedModelConfig
from pipeline.data.examples import Message
from step3_ppo.config import PPOConfig
from step3_ppo.models import Models
from step3_ppo.reward_sources import RewardSources
from tests.step3_ppo.toy import END, toy_config, toy_models

GAMES = """
import os
import time
from random import Random


def user(text):
    return [{"role": "user", "content": text}]


class Counting:
    # Has the row's number of turns; the reward depends on the answers' lengths, so groups differ.
    def reset(self, row, *, seed):
        self.left = row.get("turns", 3)
        self.seed = seed
        self.lengths = []
        return user(str(Random(seed).randrange(100)))

    def step(self, answer):
        self.lengths.append(len(answer))
        self.left -= 1
        return user("go on") if self.left else None

    def reward(self):
        return {"length": sum(self.lengths) % 7 / 7, "turns": 0.1 * len(self.lengths)}


class Plain(Counting):
    # One answer to the row's prompt.
    def reset(self, row, *, seed):
        super().reset({"turns": 1}, seed=seed)
        return row["dialogue"]


class Broken(Counting):
    # Fails as the row specifies.
    def reset(self, row, *, seed):
        self.how = row.get("how")
        if self.how == "reset":
            raise ValueError("no game today")
        if self.how == "long":
            return user("word " * 24)
        return super().reset(row, seed=seed)

    def step(self, answer):
        if self.how == "step":
            raise KeyError("lost")
        if self.how == "hang":
            time.sleep(60)
        if self.how == "exit":
            os._exit(3)
        if self.how == "text":
            return "higher"
        if self.how == "assistant":
            return [{"role": "assistant", "content": "I won"}]
        return super().step(answer)

    def reward(self):
        if self.how == "nan":
            return float("nan")
        if self.how == "word":
            return "good"
        return None if self.how == "none" else 1.0
"""


def save_actor(toy: Path) -> None:
    """Save the toy actor with a bias to end its turn, after about three tokens."""
    directory = toy / "ending"
    if directory.exists():
        return
    model = AutoModelForCausalLM.from_pretrained(toy / "actor")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        # The first hidden dimension is large, and only END has a weight for it.
        model.get_input_embeddings().weight[:, 0] = 20.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[END, 0] = 5.0
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(toy / "actor").save_pretrained(directory)


def game_config(toy: Path, environment: str, **changes: Any) -> PPOConfig:
    """Return settings of GRPO on groups of four in an environment of `GAMES`."""
    save_actor(toy)
    file = toy / "games.py"
    if not file.exists():  # another process may be reading it
        file.write_text(GAMES)
    settings = {
        "environment": f"{file}:{environment}",
        "advantage": "grpo",
        "group_size": 4,
        "max_prompt_length": 24,
        "max_new_tokens": 40,
        "reward_timeout": 20.0,
        "reward_workers": 1,
    }
    config = toy_config(toy, **{**settings, **changes})
    actor = TrainedModelConfig(path=str(toy / "ending"), optim=config.actor.optim)
    return replace(config, actor=actor, data=replace(config.data, max_eval_rows=4))


def game_models(config: PPOConfig, sources: RewardSources) -> Models:
    """Return the toy models with the environment's workers."""
    return replace(toy_models(config), sources=sources)


def make_prompts(models: Models, *extra: dict[str, Any]) -> list[Prompt]:
    """Return one prompt per mapping of columns."""
    messages = (Message("user", "hi"),)
    ids = models.chat.encode_prompt(messages)
    return [Prompt(messages, ids, columns) for columns in extra]
