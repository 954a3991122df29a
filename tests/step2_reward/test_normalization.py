"""Mean and scale of the score come from responses that ended with the end token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inference.generation import generate
from pipeline.config import DataConfig, FrozenModelConfig
from pipeline.data.examples import Encoded
from pipeline.data.sharing.steps import load_examples
from pipeline.demo.model import build_tokenizer
from pipeline.models.forward.forward import Scorer
from pipeline.models.hf.chat import load_chat
from pipeline.models.hf.load import load_causal_lm, load_classifier
from step2_reward.config import RewardConfig
from step2_reward.labels import Labels
from step2_reward.objectives import PairObjective
from step2_reward.train import compute_scores, mean_and_std, measure_scores
from tests.families import tiny_causal_lm
from tests.step2_reward.test_train import small_task

CPU = torch.device("cpu")
END = 2
PAIRS = PairObjective(Labels("pairs", "bradley_terry"), RewardConfig())


def task(directory: Path, *, ends: bool) -> RewardConfig:
    """Fifteen prompts and a model of step 1 that ends some of its answers, or none."""
    tokenizer = build_tokenizer()
    actor = tiny_causal_lm("llama", seed=10, vocab_size=len(tokenizer), tie_word_embeddings=False)
    with torch.no_grad():
        actor.lm_head.weight.zero_()
        actor.lm_head.weight[END, 0] = 12.0 if ends else 0.0  # by the sign of one hidden number
    actor.save_pretrained(directory / "actor")
    tokenizer.save_pretrained(directory / "actor")
    config = small_task(directory, normalization_prompts=15, max_new_tokens=4)
    return replace(config, actor=FrozenModelConfig(path=str(directory / "actor")))


def scored(config: RewardConfig, *, stopped: bool) -> list[float]:
    """Scores of the answers that ended, or of all, by an own loop over the prompts."""
    chat = load_chat(config.model, DataConfig())
    examples = load_examples(config.data, step=2, seed=config.seed).train
    prompts = [chat.encode_prompt(p) for p in dict.fromkeys(e.prompt for e in examples)][:15]
    responses = generate(
        load_causal_lm(config.actor, device=CPU),
        prompts,
        max_new_tokens=4,
        temperature=1.0,
        stop_ids=chat.stop_ids,
        seed=config.seed,
    )
    rows = [
        Encoded.untrained(prompt + response.ids)
        for prompt, response in zip(prompts, responses, strict=True)
        if response.stopped or not stopped
    ]
    return compute_scores(scorer(config), chat, rows, config)


def scorer(config: RewardConfig) -> Scorer:
    return Scorer(
        load_classifier(FrozenModelConfig(path=config.model.path), device=CPU, num_labels=1)
    )


def test_answers_without_an_end_do_not_enter_the_moments(tmp_path: Path) -> None:
    config = task(tmp_path, ends=True)
    chat = load_chat(config.model, DataConfig())
    examples = load_examples(config.data, step=2, seed=config.seed).train

    moments = measure_scores(scorer(config), chat, examples, config, PAIRS)

    ended, every = scored(config, stopped=True), scored(config, stopped=False)
    assert 2 <= len(ended) < len(every) == 15  # of forty rows step 2 trains on fifteen
    assert (moments.mean, moments.std) == pytest.approx(mean_and_std(ended), rel=1e-5)
    assert moments.mean != pytest.approx(mean_and_std(every)[0], rel=1e-3)
    assert moments.stop_rate == len(ended) / 15
