"""The comparison with the base model, which is omitted if there is none."""

from pathlib import Path

from evaluation.held_out import Prompt, respond_with_base
from pipeline.config import FrozenModelConfig
from pipeline.data.examples import Message
from step3_ppo.evaluate import HeldOut
from tests.step3_ppo.toy import PROMPTS, toy_config, toy_models


def test_base_model_gives_the_initial_actors_answers(toy: Path) -> None:
    config = toy_config(toy)
    prompts = [Prompt((Message("user", "two and two"),), ids) for ids in PROMPTS]
    held_out = HeldOut(toy_models(config), prompts, config)
    expected = held_out.answer_all()

    base = respond_with_base(held_out, FrozenModelConfig(path=str(toy / "actor")))

    assert base is not None
    assert (base.greedy, base.sampled) == (expected.greedy, expected.sampled)
    assert respond_with_base(held_out, FrozenModelConfig()) is None
    truncated = [(a.score, a.raw_score or 0) for a in expected.greedy if not a.stopped]
    # -1.5 is missing_eos_score in the unit of the reward model.
    assert all(score == min(raw, -1.5) for score, raw in truncated)
    assert any(score < raw for score, raw in truncated)
