"""The comparison with the base model, which the run does without where it can't be had."""

import shutil
from pathlib import Path

from evaluation.base_model import responses_of_base
from evaluation.held_out import Prompt
from evaluation.scored import ScoredResponse
from pipeline.config import FrozenModelConfig
from pipeline.data.examples import Message
from step3_ppo.evaluate import HeldOut
from tests.distributed import rank, run_ranks
from tests.step3_ppo.toy import PROMPTS, toy_config, toy_models


def held_out(toy: Path) -> HeldOut:
    config = toy_config(toy)
    prompts = [Prompt((Message("user", "two and two"),), ids) for ids in PROMPTS]
    return HeldOut(toy_models(config), prompts, config)


def answers(toy: Path, base: Path | None) -> list[ScoredResponse] | None:
    path = None if base is None else str(base)
    return responses_of_base(held_out(toy), FrozenModelConfig(path=path))


def copied(toy: Path, directory: Path) -> Path:
    return Path(shutil.copytree(toy / "actor", directory / "base"))


def test_the_base_answers_each_prompt_as_the_actor_does_before_it_has_learned(toy: Path) -> None:
    held = held_out(toy)
    with held.models.hybrid_engine.generating() as actor:
        expected = held.scored(held.respond(actor, temperature=held.config.temperature))

    assert responses_of_base(held, FrozenModelConfig(path=str(toy / "actor"))) == expected
    assert responses_of_base(held, FrozenModelConfig()) is None


def on_one_of_two(toy: Path, missing: Path) -> bool:
    return answers(toy, toy / "actor" if rank() == 0 else missing) is None


def test_what_one_process_lacks_no_process_waits_for(toy: Path, tmp_path: Path) -> None:
    base = copied(toy, tmp_path)
    (base / "model.safetensors").write_bytes(b"")

    assert run_ranks(on_one_of_two, toy, tmp_path / "missing", world_size=2) == [True, True]
    assert run_ranks(on_one_of_two, toy, base, world_size=2) == [True, True]
