"""Moments of AdamW in bf16 and in 8 bits: the same bits however vectors are cut and kept."""

from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from pipeline.config import OptimConfig
from pipeline.config.zero import OffloadConfig
from pipeline.engine.engine import Engine
from pipeline.errors import ConfigError
from pipeline.kernels.adamw.definition import Weights, read_moments
from pipeline.kernels.adamw.eight_bits import BLOCK
from tests.distributed import run_ranks, world_size
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_state import engine_at, resume, save, state, train, weights

Kind = Literal["fp32", "bf16", "8bit"]
DTYPES = {"bf16": torch.bfloat16, "8bit": torch.uint8}


def optim(moments: Kind = "8bit") -> OptimConfig:
    return OptimConfig(
        lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3, moments=moments
    )


def digests(moments: Kind) -> list[str]:
    """The weights after four steps, at every stage and with the optimizer offloaded."""
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    cases = [(stage, OffloadConfig()) for stage in range(4)]
    cases += [(2, OffloadConfig(optimizer="cpu")), (3, nvme)]
    ended: list[str] = []
    for stage, offload in cases:
        engine = engine_at(stage, optim=optim(moments), offload=offload)
        train(engine, range(4))
        ended.append(digest(weights(engine)))
    return ended


@pytest.mark.parametrize("moments", list(DTYPES))
def test_every_stage_and_offload_ends_in_the_same_bits(moments: Kind) -> None:
    for ended in run_ranks(digests, moments):
        assert len(set(ended)) == 1


def save_in(root: str, moments: Kind) -> None:
    """After two steps at stage 2, with the number of processes in its name."""
    engine = engine_at(2, optim=optim(moments))
    train(engine, range(2))
    save(engine, Path(root) / str(world_size()))


def go_on(root: str, moments: Kind) -> list[tuple[str, list[float]]]:
    """From each save, at two stages and with moments on a disk: weights and norms at the end."""
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    ended: list[tuple[str, list[float]]] = []
    for source, (stage, offload) in product((1, 2), ((0, OffloadConfig()), (3, nvme))):
        engine = engine_at(stage, optim=optim(moments), offload=offload)
        resume(engine, Path(root) / str(source))
        norms = train(engine, range(2, 4))
        ended.append((digest(weights(engine)), norms))
    return ended


@pytest.mark.jobs
@pytest.mark.parametrize("moments", list(DTYPES))
def test_a_checkpoint_of_any_cut_goes_on_in_any_other(moments: Kind, tmp_path: Path) -> None:
    for world in (1, 2):
        run_ranks(save_in, str(tmp_path), moments, world_size=world)
    straight = engine_at(0, optim=optim(moments))
    norms = train(straight, range(4))[2:]
    expected = digest(weights(straight)), norms

    for world in (1, 2):
        for ended in run_ranks(go_on, str(tmp_path), moments, world_size=world):
            assert ended == [expected] * 4


def fp32_moments(engine: Engine) -> list[Tensor]:
    return [
        moment
        for group in engine.groups
        for moment in read_moments(
            Weights(
                group.masters.fp32(),
                **{name: value for name, value in group.state.items() if name != "step"},
            )
        )
    ]


def by_name(engine: Engine) -> dict[str, list[Tensor]]:
    """Both moments of each parameter, in fp32: vectors of other kinds of moments lie otherwise."""
    moments = fp32_moments(engine)
    return {
        name: [moments[2 * number + which][place] for which in range(2)]
        for number, group in enumerate(engine.groups)
        for name, place, _ in group.spans()
    }


@pytest.mark.parametrize(
    ("first", "second"), [("fp32", "8bit"), ("8bit", "fp32"), ("bf16", "8bit"), ("8bit", "bf16")]
)
def test_moments_of_another_kind_are_converted_and_that_is_said(
    first: Kind, second: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = engine_at(1, optim=optim(first))
    train(saved, range(2))
    save(saved, tmp_path)
    resumed = engine_at(0, optim=optim(second))

    with caplog.at_level("INFO", logger="pipeline.engine.state"):
        resume(resumed, tmp_path)

    assert f"from {first} to {second}" in caplog.text
    before, after = by_name(saved), by_name(resumed)
    allowed = 1 / 8 if second == "8bit" else 2**-8 if second == "bf16" else 0.0
    for name, pair in before.items():
        for moment, theirs in zip(after[name], pair, strict=True):
            small = 2**-16 * theirs.abs().max() if second == "8bit" else 0.0
            assert ((moment - theirs).abs() <= allowed * theirs.abs() + small).all()
    assert digest(weights(resumed)) == digest(weights(saved))
    train(resumed, range(2, 4))


def test_moments_on_a_disk_pass_through_as_few_bytes_as_they_have() -> None:
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    engine = engine_at(1, optim=optim(), offload=nvme)
    train(engine, range(1))
    assert engine.disk is not None
    buffers = sum(each.nbytes for one in engine.disk._sets for each in one.values())

    numel = max(group.masters.numel for group in engine.groups)
    assert buffers == 2 * (4 * numel + 2 * numel + 2 * numel // BLOCK)
    assert all(each.numel() == 0 for group in engine.groups for each in group.moments())
    assert len(state(engine)) == 5 * len(engine.groups)


REFUSED = {
    "optim": (
        lambda: OptimConfig(name="SGD", moments="8bit"),
        "optim.moments 8bit is AdamW's without optim.params; SGD keeps its state in fp32",
    ),
    "params": (
        lambda: OptimConfig(params={"amsgrad": True}, moments="bf16"),
        "optim.moments bf16 is AdamW's without optim.params; AdamW with optim.params keeps its"
        " state in fp32",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_keeps_no_such_moments_is_refused_in_a_sentence(what: str) -> None:
    attempt, sentence = REFUSED[what]

    with pytest.raises(ConfigError) as error:
        attempt()

    assert str(error.value) == sentence
