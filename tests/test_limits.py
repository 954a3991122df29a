"""Settings of the steps and commands: the last accepted values, and the first refused ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.generate import GenerateConfig
from inference.serve.config import ServeConfig, read_keys
from inference.settings import SamplingOptions
from pipeline.config import FrozenModelConfig, LoraConfig, TrainedModelConfig
from pipeline.data.inspect import InspectConfig
from pipeline.engine.memory import MemoryConfig, parse_count
from pipeline.system.errors import ConfigError
from rewards.config import RewardConfig as Source
from step1_sft.config import SFTConfig
from step2_reward.config import LabConfig, RewardConfig
from step3_ppo.config import PPOConfig
from step3_ppo.reward_settings import without_reward_options
from step3_preference.config import GuardConfig, PreferenceConfig

COUNT = ((1,), (0,))
ABOVE = ((1e-9,), (0.0,))
NOT_BELOW = ((0,), (-1,))
INSIDE = ((1e-9, 0.999), (0.0, 1.0))
SHARE = ((0.0, 1.0), (-1e-9, 1.001))
OR_NULL = ((1, None), (0,))

GENERATE = {"path": "it", "prompts": Path("in.jsonl"), "out": Path("out.jsonl")}
DROPOUT = TrainedModelConfig(lora=LoraConfig(dropout=0.1))
MODELS = tuple(Source(name=name, kind="model") for name in "ab")
TURNS = tuple(Source(name=name, kind="environment") for name in "ab")
LENGTH = Source(name="length", kind="length", max_tokens=9)
GAME = {"environment": "game.py:Game"}
STOP = GuardConfig(signal="chosen_nll", limit=0.5, action="stop")
ADVANTAGE = {"advantage": "reinforce_pp", "baseline": "group", "group_size": 2}

LIMITS: list[tuple[type, dict[str, Any], dict[str, tuple[Any, Any]]]] = [
    (SFTConfig, {}, {"patience": OR_NULL}),
    (
        RewardConfig,
        {},
        {
            "patience": OR_NULL,
            "center_coef": ((0.0,), (-1e-9,)),
            "normalization_prompts": ((2,), (1,)),
            "max_new_tokens": COUNT,
            "focal_gamma": ((0.0,), (-1e-9,)),
            "class_list": (((), ("bad", "good")), (("one",), ("two", "two"))),
            "class_weights": (((1e-9, 1.0),), ((0.0, 1.0),)),
            "step_separator": ((" ",), ("",)),
        },
    ),
    (
        LabConfig,
        {"path": "it"},
        {
            "path": (("it",), ("",)),
            **dict.fromkeys(("rows", "best_of", "prompts"), COUNT),
            "max_length": ((2,), (1,)),
        },
    ),
    (
        PPOConfig,
        {},
        {
            **dict.fromkeys(("group_size", "generation_batch_size", "max_prompt_length"), COUNT),
            **dict.fromkeys(("max_new_tokens", "inference_tp_size", "ppo_epochs"), COUNT),
            **dict.fromkeys(("kl_horizon", "samples_every", "max_turns", "reward_timeout"), COUNT),
            **dict.fromkeys(("reward_workers", "temperature"), COUNT),
            **dict.fromkeys(("gamma", "lam", "max_reward_failures"), SHARE),
            **dict.fromkeys(("clip_high", "value_clip", "score_clip", "kl_target"), OR_NULL),
            **dict.fromkeys(("kl_coef", "correction_threshold"), ((0.0,), (-1e-9,))),
            "dynamic_sampling": ((0,), (-1,)),
            "target_kl": OR_NULL,
            "clip": INSIDE,
            "ema_decay": INSIDE,
            "dual_clip": ((1.001, None), (1.0,)),
            "correction_cap": ((1.0,), (0.999,)),
        },
    ),
    (PPOConfig, {"batch_size": 1}, {"rollout_size": ((2,), (1, 0))}),
    (PPOConfig, {"rollout_size": 8}, {"batch_size": ((8,), (9,))}),
    (
        PPOConfig,
        {"max_new_tokens": 8, "missing_eos_score": None},
        {"overlong_buffer": ((0, 8), (-1, 9))},
    ),
    (
        PreferenceConfig,
        {},
        {
            **dict.fromkeys(("beta", "temperature"), ABOVE),
            **dict.fromkeys(("max_prompt_length", "max_new_tokens"), COUNT),
            **dict.fromkeys(("gamma", "nll_coef", "eval_prompts"), NOT_BELOW),
            "label_smoothing": ((0.0, 0.49), (-1e-9, 0.5)),
            "patience": OR_NULL,
            "shares": (((1,),), ((),)),
        },
    ),
    (
        PreferenceConfig,
        {"method": "kto", "loss": "kto"},
        dict.fromkeys(("weight_chosen", "weight_rejected"), ((0.1, "auto"), (0.0,))),
    ),
    (
        SamplingOptions,
        {"max_new_tokens": 8},
        {
            "max_new_tokens": COUNT,
            "min_new_tokens": ((0, 8), (-1, 9)),
            "temperature": ((0.0,), (-1e-9,)),
            "top_p": ((1e-9, 1.0), (0.0, 1.001)),
            "top_k": OR_NULL,
            "min_p": SHARE,
            "repetition_penalty": ABOVE,
        },
    ),
    (
        GenerateConfig,
        GENERATE,
        {
            **dict.fromkeys(("samples", "batch_size"), COUNT),
            "cache_gib": ((1e-9, None), (0.0,)),
            "stop": (((), ("a",)), (("a", ""),)),
            "path": (("it",), ("",)),
            **dict.fromkeys(("prompts", "out"), ((Path("it"),), (Path(),))),
        },
    ),
    (
        ServeConfig,
        {"path": ("it",)},
        {
            "path": ((("it",),), ((),)),
            "port": ((0, 65535), (-1, 65536)),
            **dict.fromkeys(("slots", "context", "prefill_chunk"), OR_NULL),
            **dict.fromkeys(("cache_gib", "queue_seconds", "request_seconds"), ABOVE),
            **dict.fromkeys(("idle_seconds", "max_body_mib"), ABOVE),
            **dict.fromkeys(("queue", "max_tokens_default", "max_n"), COUNT),
            "drain_seconds": ((0.0,), (-1e-9,)),
            "cors": ((("http://a:1", "https://b"),), (("ftp://a",), ("http://a/b",), ("a//b",))),
            "watch": ((Path(),), (Path("no such directory"),)),
        },
    ),
    (InspectConfig, {}, {"rows": NOT_BELOW}),
    (MemoryConfig, {"params": "7B"}, {"gpus": COUNT, "nodes": COUNT}),
]

CONTRADICTIONS: list[tuple[type, dict[str, Any], str]] = [
    (SFTConfig, {"patience": 1, "eval_every": 0}, "patience"),
    (RewardConfig, {"patience": 1, "eval_every": 0}, "patience"),
    (RewardConfig, {"labels": "ties", "loss": "mse"}, "loss"),
    (RewardConfig, {"class_list": ("a", "b"), "class_values": (1.0,)}, "class_values"),
    (LabConfig, {"path": "it", "actor": "it", "data_path": "rows.jsonl"}, "actor"),
    (PPOConfig, {"kl_target": 1.0, "kl_coef": 0.0}, "kl_target"),
    (PPOConfig, {"actor": DROPOUT}, "actor.lora.dropout"),
    (PPOConfig, {"critic": DROPOUT}, "critic.lora.dropout"),
    (PPOConfig, {"rollout_size": 8, "batch_size": 8, "group_size": 3}, "group_size"),
    (PPOConfig, {"loss": "none", "ppo_epochs": 2, "batch_size": 8, "rollout_size": 8}, "loss none"),
    (PPOConfig, {"loss": "none", "ppo_epochs": 1, "batch_size": 4, "rollout_size": 8}, "loss none"),
    (PPOConfig, {"rewards": TURNS, **GAME}, "two sources of kind environment"),
    (PPOConfig, {"rewards": TURNS[:1]}, "ppo.environment names none"),
    (PPOConfig, {"rewards": (TURNS[0], replace(LENGTH, name="a")), **GAME}, "has the name of"),
    (PPOConfig, {"gold": TURNS[0], **GAME}, "ppo.gold"),
    (PPOConfig, {"inference_tp_size": 2, **GAME}, "inference_tp_size"),
    (PPOConfig, {"rewards": MODELS}, "two sources of kind model"),
    (PPOConfig, {"rewards": (replace(LENGTH, name="score"),)}, "rewards.score"),
    (PPOConfig, {"gold": MODELS[0]}, "ppo.gold"),
    (PPOConfig, {"rewards": (LENGTH,), "missing_eos_score": -2.0}, "missing_eos_score"),
    (PPOConfig, {"rewards": (LENGTH,), "score_clip": 2.0}, "score_clip"),
    (PPOConfig, {**ADVANTAGE, "whiten_rewards": True}, "whiten_rewards"),
    (PPOConfig, {"advantage": "rloo", "group_size": 2, "gamma": 0.9}, "ppo.gamma"),
    (PPOConfig, {"advantage": "rloo", "group_size": 2, "critic_warmup_steps": 1}, "warmup"),
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
    (ServeConfig, {"path": ("it",), "tls_cert": Path("it")}, "tls_cert"),
    (ServeConfig, {"path": ("it",), "tls_key": Path("it")}, "tls_key"),
    (MemoryConfig, {}, "model"),
    (MemoryConfig, {"params": "7B", "model": "it"}, "model"),
]

CASES = [
    pytest.param(kind, base, name, *values, id=f"{kind.__name__}.{name}")
    for kind, base, limits in LIMITS
    for name, values in limits.items()
]


@pytest.mark.parametrize(("kind", "base", "name", "accepted", "refused"), CASES)
def test_values_are_accepted_up_to_their_limits(
    kind: type, base: dict[str, Any], name: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in accepted:
        assert getattr(kind(**{**base, name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError, match=name.replace("_", "[_-]")):
            kind(**{**base, name: value})


@pytest.mark.parametrize(("kind", "settings", "named"), CONTRADICTIONS)
def test_contradictory_settings_are_refused(
    kind: type, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        kind(**settings)


def test_keys_are_read_from_options_variable_and_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLHF_API_KEY", "variable")
    file = tmp_path / "keys"
    file.write_text("# comment\n\nname eightlet\n other-key\n")

    keys = read_keys(ServeConfig(path=("it",), api_key=("optional",), api_key_file=file))

    named = {"key 1": "optional", "key 2": "variable", "name": "eightlet"}
    assert keys == {**named, "keys line 4": "other-key"}
    for content in ("a b c-long-key", "", "short", "ünïcödes-"):
        file.write_text(content)
        with pytest.raises(ConfigError, match="--api-key"):
            read_keys(ServeConfig(path=("it",), api_key_file=file))
    monkeypatch.delenv("RLHF_API_KEY")
    with pytest.raises(ConfigError, match="--host"):
        read_keys(ServeConfig(path=("it",), host="0.0.0.0"))
    assert read_keys(ServeConfig(path=("it",), host="0.0.0.0", insecure_no_key=True)) == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1_889,110", 1889110), ("1889.1M", 1889100000), ("7b", 7 * 10**9), ("2K", 2000)],
)
def test_numbers_of_parameters_are_read_with_their_factor(text: str, number: int) -> None:
    assert parse_count(text, "params") == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1e999", "B7"])
def test_what_is_no_number_of_parameters_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="params"):
        parse_count(text, "params")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([("reward", ["math"]), ("rewards", ["[]"])], "--rewards lists the sources already"),
        ([("reward_function", [])], "--reward-function needs at least one value"),
        ([("reward_function", ["score.txt:check"])], "--reward-function score.txt:check"),
    ],
)
def test_short_options_of_rewards_are_refused_where_they_name_no_source(
    options: list[tuple[str, list[str]]], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        without_reward_options(options)
