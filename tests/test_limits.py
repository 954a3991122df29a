"""Limits of settings: values just inside are accepted, values just outside are rejected."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.generate import GenerateConfig
from inference.serve.config import ServeConfig
from inference.settings import SamplingOptions
from pipeline.config import DataConfig, FrozenModelConfig, LoraConfig, TrainedModelConfig
from pipeline.data.inspect import InspectConfig
from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig as Source
from step1_sft.config import SFTConfig
from step2_reward.config import LabConfig, RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.reward_settings import read_reward_options
from step3_preference.config import GuardConfig, PreferenceConfig

COUNT = ((1,), (0,))
POSITIVE = ((1e-9,), (0.0,))
NON_NEGATIVE = ((0,), (-1,))
FRACTION = ((0.0, 1.0), (-1e-9, 1.001))
OR_NULL = ((1, None), (0,))

OVERLONG = {"max_new_tokens": 8, "missing_eos_score": None}
SERVE = {"path": ("it",)}
GENERATE = {"path": "it", "prompts": Path("in.jsonl"), "out": Path("out.jsonl")}
DROPOUT = TrainedModelConfig(lora=LoraConfig(dropout=0.1))
MODELS = tuple(Source(name=name, kind="model") for name in "ab")
TURNS = tuple(Source(name=name, kind="environment") for name in "ab")
LENGTH = Source(name="length", kind="length", max_tokens=9)
GAME = {"environment": "game.py:Game"}
STOP = GuardConfig(signal="chosen_nll", limit=0.5, action="stop")
ADVANTAGE = {"advantage": "reinforce_pp", "baseline": "group", "group_size": 2}

LIMITS: list[tuple[type, dict[str, Any], str, tuple[Any, Any]]] = [
    (SFTConfig, {}, "patience", OR_NULL),
    (SFTConfig, {}, "distill_weight", FRACTION),
    (RewardConfig, {}, "patience", OR_NULL),
    (RewardConfig, {}, "center_coef focal_gamma", ((0.0,), (-1e-9,))),
    (RewardConfig, {}, "class_list", (((), ("bad", "good")), (("one",), ("two", "two")))),
    (RewardConfig, {}, "class_weights", (((1e-9, 1.0),), ((0.0, 1.0),))),
    (RewardConfig, {}, "step_separator", ((" ",), ("",))),
    (LabConfig, {"path": "it"}, "rows", COUNT),
    (LabConfig, {"path": "it"}, "max_length", ((2,), (1,))),
    (PPOConfig, {}, "group_size generation_batch_size max_prompt_length max_new_tokens", COUNT),
    (PPOConfig, {}, "inference_tp_size ppo_epochs samples_every max_turns", COUNT),
    (PPOConfig, {}, "reward_timeout reward_workers temperature", COUNT),
    (PPOConfig, {}, "gamma lam gkd_beta gkd_lambda max_reward_failures", FRACTION),
    (PPOConfig, {}, "clip_high value_clip score_clip target_kl", OR_NULL),
    (PPOConfig, {}, "kl_coef correction_threshold entropy_coef ptx_coef", ((0.0,), (-1e-9,))),
    (PPOConfig, {}, "dynamic_sampling", NON_NEGATIVE),
    (PPOConfig, {}, "clip ema_decay", ((1e-9, 0.999), (0.0, 1.0))),
    (PPOConfig, {}, "dual_clip", ((1.001, None), (1.0,))),
    (PPOConfig, {}, "correction_cap", ((1.0,), (0.999,))),
    (PPOConfig, {"batch_size": 1}, "rollout_size", ((2,), (1, 0))),
    (PPOConfig, {"rollout_size": 8}, "batch_size", ((8,), (9,))),
    (PPOConfig, OVERLONG, "overlong_buffer", ((0, 8), (-1, 9))),
    (PreferenceConfig, {}, "beta temperature", POSITIVE),
    (PreferenceConfig, {}, "max_prompt_length max_new_tokens", COUNT),
    (PreferenceConfig, {}, "gamma nll_coef eval_prompts", NON_NEGATIVE),
    (PreferenceConfig, {}, "label_smoothing", ((0.0, 0.49), (-1e-9, 0.5))),
    (PreferenceConfig, {}, "patience", OR_NULL),
    (PreferenceConfig, {}, "shares", (((1,),), ((),))),
    (PreferenceConfig, {"loss": "kto"}, "weight_chosen weight_rejected", ((0.1, "auto"), (0.0,))),
    (SamplingOptions, {}, "max_new_tokens", COUNT),
    (SamplingOptions, {"max_new_tokens": 8}, "min_new_tokens", ((0, 8), (-1, 9))),
    (GenerateConfig, GENERATE, "temperature", ((0.0,), (-1e-9,))),
    (SamplingOptions, {}, "top_p", ((1e-9, 1.0), (0.0, 1.001))),
    (SamplingOptions, {}, "top_k", OR_NULL),
    (SamplingOptions, {}, "min_p", FRACTION),
    (SamplingOptions, {}, "repetition_penalty", POSITIVE),
    (GenerateConfig, GENERATE, "samples batch_size", COUNT),
    (GenerateConfig, GENERATE, "top_logprobs", NON_NEGATIVE),
    (GenerateConfig, GENERATE, "cache_gib", ((1e-9, None), (0.0,))),
    (GenerateConfig, GENERATE, "stop", (((), ("a",)), (("a", ""),))),
    (GenerateConfig, GENERATE, "prompts out", ((Path("it"),), (Path(),))),
    (ServeConfig, SERVE, "port", ((0, 65535), (-1, 65536))),
    (ServeConfig, SERVE, "slots context prefill_chunk", OR_NULL),
    (ServeConfig, SERVE, "cache_gib queue_seconds request_seconds", POSITIVE),
    (ServeConfig, SERVE, "idle_seconds max_body_mib", POSITIVE),
    (ServeConfig, SERVE, "queue max_tokens_default max_n", COUNT),
    (ServeConfig, SERVE, "drain_seconds", ((0.0,), (-1e-9,))),
    (InspectConfig, {}, "rows", NON_NEGATIVE),
]

BUFFER = {"overlong_buffer": 4.0}
GROUP = {"advantage": "rloo", "group_size": 4, "kl_in": "none", "missing_eos_score": None}
CONTRADICTIONS: list[tuple[type, dict[str, Any], str]] = [
    (SFTConfig, {"patience": 1, "eval_every": 0}, "patience"),
    (SFTConfig, {"distill_weight": 0.5, "data": DataConfig(train_on="all")}, "data.train_on"),
    (RewardConfig, {"patience": 1, "eval_every": 0}, "patience"),
    (RewardConfig, {"labels": "pairs", "loss": "mse"}, "loss"),
    (RewardConfig, {"class_list": ("a", "b"), "class_values": (1.0,)}, "class_values"),
    (PPOConfig, {"actor": DROPOUT}, "actor.lora.dropout"),
    (PPOConfig, {"rollout_size": 8, "batch_size": 8, "group_size": 3}, "group_size"),
    (PPOConfig, {"loss": "none", "ppo_epochs": 2, "batch_size": 8, "rollout_size": 8}, "loss none"),
    (PPOConfig, {"loss": "none", "ppo_epochs": 1, "batch_size": 4, "rollout_size": 8}, "loss none"),
    (PPOConfig, {"rewards": TURNS, **GAME}, "two sources of kind environment"),
    (PPOConfig, {"rewards": TURNS[:1]}, "ppo.environment is not set"),
    (PPOConfig, {"rewards": (TURNS[0], replace(LENGTH, name="a")), **GAME}, "has the same name as"),
    (PPOConfig, {"gold": TURNS[0], **GAME}, "ppo.gold"),
    (PPOConfig, {"rewards": MODELS}, "two sources of kind model"),
    (PPOConfig, {"rewards": (replace(LENGTH, name="score"),)}, "rewards.score"),
    (PPOConfig, {"gold": MODELS[0]}, "ppo.gold"),
    (PPOConfig, {"rewards": (LENGTH,), "missing_eos_score": -2.0}, "missing_eos_score"),
    (PPOConfig, {**ADVANTAGE, "group_size": 1}, "ppo.baseline group is the mean"),
    (PPOConfig, {**GROUP, "baseline": "group"}, "baseline group requires ppo.advantage reinf"),
    (PPOConfig, {**GROUP, "kl_in": "loss", "kl_estimator": "k1"}, "k1 in the loss has an expected"),
    (PPOConfig, {**GROUP, "kl_in": "reward", "kl_estimator": "k3"}, "k3 is for the loss"),
    (PPOConfig, {**GROUP, "overlong": "mask", "missing_eos_score": -1.0}, "overlong mask and ppo"),
    (PPOConfig, {**GROUP, **BUFFER, "missing_eos_score": -1.0}, "ppo.overlong_buffer 4 and ppo"),
    (PPOConfig, {**GROUP, **BUFFER, "overlong": "mask"}, "ppo.overlong mask excludes"),
    (PPOConfig, {**GROUP, "advantage": "dr_grpo", "group_size": 1}, "group_size to 2 or more"),
    (PPOConfig, {"dynamic_sampling": 2, "group_size": 1}, "ppo.dynamic_sampling"),
    (PPOConfig, {"rollout_processes": 1, "inference_tp_size": 2}, "ppo.rollout_processes"),
    (PPOConfig, {"rollout_processes": 1, **GAME}, "ppo.rollout_processes supports neither"),
    (PPOConfig, {"drop_solved": 0.9}, "ppo.drop_solved 0.9 must"),
    (PPOConfig, {"ptx_data": ("it",)}, "ppo.ptx_data requires"),
    (PPOConfig, {**GROUP, "loss": "cispo", "dual_clip": 3.0}, "dual_clip bounds a clipped loss"),
    (PPOConfig, {"advantage": "rloo", "group_size": 2, "gamma": 0.9}, "ppo.gamma"),
    (PreferenceConfig, {"patience": 1, "eval_every": 0}, "patience"),
    (
        PreferenceConfig,
        {"eval_every": 0, "save_every": 1, "guards": (STOP,)},
        "eval_every must not be 0",
    ),
    (PreferenceConfig, {"precompute": "on", "reference_free": True}, "precompute"),
    (PreferenceConfig, {"robust": True}, "robust"),
    (PreferenceConfig, {"weight_chosen": 2.0}, "weight_chosen"),
    (PreferenceConfig, {"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
    (PreferenceConfig, {"precompute": "off"}, "precompute off"),
    (PreferenceConfig, {"loss": "orpo"}, "loss orpo"),
    (PreferenceConfig, {"loss": "kto", "logp": "mean"}, "loss kto"),
    (PreferenceConfig, {"reward": FrozenModelConfig(quantize="int8")}, "reward"),
]

CASES = [
    pytest.param(kind, base, name, *values, id=f"{kind.__name__}.{name}")
    for kind, base, names, values in LIMITS
    for name in names.split()
]


@pytest.mark.parametrize(("cls", "base", "name", "valid", "invalid"), CASES)
def test_settings_are_accepted_up_to_their_limits(
    cls: type, base: dict[str, Any], name: str, valid: tuple[Any, ...], invalid: tuple[Any, ...]
) -> None:
    for value in valid:
        assert getattr(cls(**{**base, name: value}), name) == value
    for value in invalid:
        with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
            cls(**{**base, name: value})


@pytest.mark.parametrize(("cls", "settings", "message"), CONTRADICTIONS)
def test_contradictory_settings_are_rejected(
    cls: type, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([("reward_function", [])], "--reward-function needs at least one value"),
        ([("reward_function", ["score.txt:check"])], "--reward-function score.txt:check"),
    ],
)
def test_reward_options_that_name_no_source_are_rejected(
    options: list[tuple[str, list[str]]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_reward_options(options)
