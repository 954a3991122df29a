"""Reward models with their own tokenizer and chat template."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from evaluation.held_out import Prompt
from inference.engine.requests import Response
from pipeline.config import FrozenModelConfig
from pipeline.data.examples import Message
from pipeline.models.hf.chat import load_chat
from pipeline.system.errors import ModelError
from step3_ppo.experience import score_responses
from step3_ppo.rewards import compute_raw_scores
from tests.families import tiny_classifier
from tests.pipeline.data.tokenizers import metaspace
from tests.step3_ppo.toy import END, toy_config, toy_models

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def foreign_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model with a different tokenizer and template from the actor's."""
    path = tmp_path_factory.mktemp("foreign")
    tokenizer = metaspace()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    model = tiny_classifier("llama", seed=7, vocab_size=len(tokenizer), bos_token_id=1)
    model.save_pretrained(path)
    return path


def test_reward_model_scores_text_with_its_own_tokenizer(toy: Path, foreign_reward: Path) -> None:
    reward = FrozenModelConfig(path=str(foreign_reward))
    config = toy_config(toy, max_prompt_length=40, reward=reward)
    models = toy_models(config)
    continued = (Message("user", "How are you?"), Message("assistant", "I am"))
    texts = [(Message("user", "Hi there."),), continued]
    prompts = [Prompt(turns, models.chat.encode_prompt(turns)) for turns in texts]
    assert models.reward.text is not None
    models.reward.text.register_prompts(prompts)
    inputs = [prompt.input_ids for prompt in prompts]
    finished = Response([38, 31, END], [-1.0] * 3, stopped=True)  # after a space
    truncated = Response([38, 41, 42], [-1.0] * 3, stopped=False)

    scores = compute_raw_scores(models, inputs, [finished, truncated], config)
    experience = score_responses(models, inputs, [finished, truncated], config)

    tokenizer = AutoTokenizer.from_pretrained(foreign_reward)
    model = AutoModelForSequenceClassification.from_pretrained(foreign_reward, num_labels=1)
    expected = []
    for prompt, response in zip(prompts, (finished, truncated), strict=True):
        question, *prefix = (turn.content for turn in prompt.messages)
        answer = models.chat.tokenizer.decode(response.ids, skip_special_tokens=True)
        text = f"<s>[user] {question}</s>[assistant] {''.join([*prefix, answer]).strip()}"
        text += "</s>" if response.stopped else ""
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[0, -1]
            expected.append(model.score(hidden).item())
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    assert experience.score.tolist() == scores.tolist()


def test_critic_must_have_the_actors_tokenizer(toy: Path, foreign_reward: Path) -> None:
    config = toy_config(toy)
    config = replace(config, critic=replace(config.critic, path=str(foreign_reward)))
    tokenizer = load_chat(config.actor, config.data).tokenizer

    assert tokenizer.get_vocab() != AutoTokenizer.from_pretrained(foreign_reward).get_vocab()
    with pytest.raises(ModelError, match="have different tokenizers"):
        toy_models(config)
