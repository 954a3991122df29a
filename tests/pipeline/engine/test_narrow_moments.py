"""Moments of AdamW in bf16 and in 8 bits: the same bits however vectors are cut and kept."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from pipeline.config import OptimConfig, TrainedModelConfig
from pipeline.config.zero import OffloadConfig
from pipeline.engine.engine import Engine
from pipeline.engine.predict import predict, streamed
from pipeline.engine.state import describe, trained_bytes, trained_fragments
from pipeline.errors import ConfigError
from pipeline.kernels.adamw import definition
from pipeline.kernels.adamw.definition import AdamW, Weights, new_moments, read_moments
from pipeline.kernels.adamw.eight_bits import BLOCK
from tests.distributed import run_ranks, world_size
from tests.pipeline.engine import test_unused as unused
from tests.pipeline.engine.test_invariance import digest
from tests.pipeline.engine.test_stages import build
from tests.pipeline.engine.test_state import engine_at, resume, save, state, train, weights

Kind = Literal["fp32", "bf16", "8bit"]
DTYPES = {"bf16": torch.bfloat16, "8bit": torch.uint8}


def optim(moments: Kind = "8bit") -> OptimConfig:
    return OptimConfig(
        lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=3, moments=moments
    )


def plainly(dtype: torch.dtype, ranks: int, weight_decay: float) -> dict[str, Tensor]:
    """Each parameter by itself, flat, by the definition, when it has a gradient."""
    model = unused.build("fp32")
    params = dict(model.named_parameters())
    kept = {
        name: Weights(each.detach().flatten().clone(), **new_moments(each.flatten(), dtype))
        for name, each in params.items()
    }
    updates = dict.fromkeys(params, 0)
    for step in range(len(unused.STEPS)):
        for name, gradient in unused.sums_of(model, step, ranks).items():
            updates[name] += 1
            decay = weight_decay if params[name].ndim > 1 else 0.0
            numbers = AdamW(
                lr=1e-2,
                betas=(0.9, 0.95),
                eps=1e-8,
                weight_decay=decay,
                step=updates[name],
            )
            definition.adamw_(kept[name], gradient.flatten(), numbers)
            params[name].data.copy_(kept[name].master.view(params[name].shape))
    return {name: each.master for name, each in kept.items()}


def wrong_stages(moments: Kind) -> list[str]:
    """Stages and places of the optimizer whose weights are not those of the plain loop."""
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    offloads = {"": OffloadConfig(), "cpu": OffloadConfig(optimizer="cpu"), "nvme": nvme}
    # Without decay a bias of 16 lies before a matrix, which then begins within a block of 32.
    expected = {rate: plainly(DTYPES[moments], world_size(), rate) for rate in (0.1, 0.0)}
    wrong: list[str] = []
    cases = [("", stage, "auto", 0.1) for stage in range(4)]
    cases += [("cpu", 2, "auto", 0.1), ("", 1, "off", 0.0), ("nvme", 3, "auto", 0.0)]
    for where, stage, kernels, rate in cases:
        own = OptimConfig(lr=1e-2, weight_decay=rate, moments=moments)
        config = unused.config(own, stage, kernels, offload=offloads[where])
        engine = Engine(unused.build("fp32"), config, total_steps=len(unused.STEPS))
        unused.train(engine, range(len(unused.STEPS)))
        found = unused.wrong(engine, expected[rate])
        wrong += [f"{moments} stage {stage} {where} kernels {kernels}: {name}" for name in found]
    return wrong


@pytest.mark.jobs
@pytest.mark.parametrize("moments", list(DTYPES))
@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_those_of_each_parameter_by_itself(moments: Kind, world: int) -> None:
    """At every stage and offload; some parameters miss some updates."""
    for wrong in run_ranks(wrong_stages, moments, world_size=world):
        assert wrong == []


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

    assert f"are kept as {first}, and are converted to {second}" in caplog.text
    before, after = by_name(saved), by_name(resumed)
    allowed = 1 / 8 if second == "8bit" else 2**-8 if second == "bf16" else 0.0
    for name, pair in before.items():
        for moment, theirs in zip(after[name], pair, strict=True):
            small = 2**-16 * theirs.abs().max() if second == "8bit" else 0.0
            assert ((moment - theirs).abs() <= allowed * theirs.abs() + small).all()
    assert digest(weights(resumed)) == digest(weights(saved))
    train(resumed, range(2, 4))


def of_model(stage: int, moments: Kind = "8bit") -> TrainedModelConfig:
    return TrainedModelConfig(
        zero_stage=stage,  # pyright: ignore[reportArgumentType]
        optim=optim(moments),
    )


def wrong_bytes(moments: Kind) -> list[str]:
    """Stages at which the engine keeps other bytes of moments than were predicted."""
    wrong: list[str] = []
    for stage in range(4):
        model = build("opt", "bf16", hidden_size=28, word_embed_proj_dim=28)
        config = of_model(stage, moments)
        expected = predict(model, config, world=world_size())["moments"]
        engine = Engine(model, config, total_steps=2)
        train(engine, range(1))
        kept = sum(each.nbytes for group in engine.groups for each in group.moments())
        written = sum(each.tensor.nbytes for each in trained_fragments(engine, "model"))
        if (kept, written) != (expected, trained_bytes(engine)):
            wrong.append(f"stage {stage}: {kept} {expected} {written} {trained_bytes(engine)}")
        assert describe(engine)["moments_kept"] == moments
    return wrong


@pytest.mark.jobs
@pytest.mark.parametrize("moments", list(DTYPES))
def test_the_predicted_bytes_are_those_that_are_kept_and_saved(moments: Kind) -> None:
    for wrong in run_ranks(partial(wrong_bytes, moments)):
        assert wrong == []


def test_moments_on_a_disk_pass_through_as_few_bytes_as_they_have() -> None:
    nvme = OffloadConfig(optimizer="nvme", nvme_path=Path("/tmp"))
    engine = engine_at(1, optim=optim(), offload=nvme)
    train(engine, range(1))
    assert engine.disk is not None
    buffers = sum(each.nbytes for one in engine.disk._sets for each in one.values())

    model = build("llama", "bf16")
    expected = streamed(model, unused.config(optim(), 1, offload=nvme), world=1)

    assert buffers == expected
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
