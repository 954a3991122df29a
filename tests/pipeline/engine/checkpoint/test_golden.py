"""What an earlier version of the program saved is read by this one, or refused by its format."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from pipeline.engine.checkpoint.find import newest
from pipeline.engine.checkpoint.manifest import READABLE
from pipeline.engine.resume import EngineCheckpoints
from pipeline.errors import CheckpointError
from tests.pipeline.engine.checkpoint.golden import STEPS, golden_engine, numbers, train
from tests.pipeline.engine.checkpoint.saving import sealed

FORMATS = sorted((Path(__file__).parents[3] / "data").glob("checkpoint_format_*"))


def test_every_format_is_there() -> None:
    assert [path.name for path in FORMATS] == [f"checkpoint_format_{each}" for each in READABLE]


@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_golden_checkpoint_is_read_to_the_bit_and_goes_on(golden: Path) -> None:
    engine = golden_engine()
    train(engine, range(2 * STEPS))  # other weights than at the start

    state = EngineCheckpoints(engine).load(golden)

    assert engine.steps == STEPS
    assert numbers(engine) == state["numbers"]
    fresh, straight = golden_engine(), golden_engine()
    EngineCheckpoints(fresh).load(golden)
    train(straight, range(STEPS))
    for each in (engine, fresh, straight):
        train(each, range(STEPS, STEPS + 1))
    assert numbers(engine) == numbers(fresh)
    # The bias before a normalization has no gradient but rounding, which each processor has of its
    # own, and of which Adam makes whole steps.
    # A step moves a weight by 0.1; processors differ by 1e-6 after three.
    near = functools.partial(pytest.approx, rel=1e-5, abs=2e-6)
    for name in ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "1.running_var"):
        assert numbers(engine)[name] == near(numbers(straight)[name]), name


def test_a_later_format_is_refused_by_its_number(tmp_path: Path) -> None:
    root = tmp_path / "later"
    shutil.copytree(FORMATS[-1], root)
    for path in root.glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["format"] = 999
        del manifest["crc32"]
        path.write_bytes(sealed(json.dumps(manifest)))

    checkpoint, (sentence,) = newest(root)

    assert checkpoint is None
    assert "has format 999; this version of the program reads formats 1 and 2" in sentence
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* has format 999"):
        EngineCheckpoints(golden_engine()).load(root)
