"""A kernel that is wrong on the GPU at hand is not used there, and the log says so."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import KernelError
from pipeline.kernels import adam as adamw
from pipeline.kernels import choice, decode_reference
from pipeline.kernels.choice import SWITCH, gpu_for
from pipeline.kernels.cuda import adam, append, decode, sample
from pipeline.kernels.cuda import gpu as gpu_module
from pipeline.kernels.cuda.cache import CubinCache
from pipeline.kernels.cuda.driver import Driver, LaunchError
from pipeline.kernels.cuda.gpu import Gpu
from pipeline.kernels.decode_reference import Scores
from tests.pipeline.kernels.cuda.emulated import Emulator

CPU = torch.device("cpu")

SHAPE = decode.Shape(2, 64, 2)

ADAMW = (torch.float32, torch.float32, None, True)
"""Its kind in bf16 training."""

KERNELS = {
    "adamw": adam.specialisation(ADAMW),
    "decode_attention": decode.specialisation(torch.bfloat16, SHAPE),
    "append": append.SPECIALISATION,
    "sample": sample.specialisation(torch.bfloat16),
}

FAULTS = {
    "adamw": ("* f.multiplier;", ";"),
    "decode_attention": ("if (token >= keys.end) score[a][g] = MINUS_INFINITY;", ""),
    "append": ("token * of_token", "0 * of_token"),
    "sample": ("state ^ (state >> 27)", "state ^ (state >> 26)"),
}
"""Which a GPU that is not the one of the tests might have."""


@pytest.fixture(autouse=True)
def emulated(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Operators find the emulated GPU; what they find out is forgotten afterwards."""
    cubins = CubinCache(tmp_path / "cubins")
    for operators in (choice, adamw):
        monkeypatch.setattr(operators, "gpu_of", lambda _: emulator.gpu(cubins=cubins))
    adamw._on_gpu.cache_clear()
    choice._compiled.cache_clear()
    choice._say_once.cache_clear()
    with emulator.memory():
        yield
    adamw._on_gpu.cache_clear()
    choice._compiled.cache_clear()
    choice._say_once.cache_clear()


def found(name: str) -> Gpu | None:
    return gpu_for("the operator", CPU, None, name, KERNELS[name])


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_is_right_is_used(name: str) -> None:
    assert isinstance(found(name), Gpu)


def test_both_kernels_of_decode_attention_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, names = Driver.launch, []

    def noted(*args: Any, name: str, **kwargs: Any) -> None:
        names.append(name)
        launch(*args, name=name, **kwargs)

    monkeypatch.setattr(Driver, "launch", noted)

    assert found("decode_attention") is not None

    assert set(names) == {"decode_attention", "decode_attention_combine"}


@pytest.mark.parametrize("num_splits", [1, 2])
def test_what_was_asked_once_has_nothing_left_to_load(
    num_splits: int, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = found("decode_attention")
    assert gpu is not None

    def load(*_: object) -> int:
        raise AssertionError("loaded again, which a capture forbids")

    monkeypatch.setattr(Driver, "load", load)
    monkeypatch.setattr(Driver, "kernel", load)
    query, key = torch.randn(3, 2, 64).bfloat16(), torch.randn(3, 1, 20, 64).bfloat16()
    scores = Scores(lengths=torch.tensor([20, 1, 7], dtype=torch.int32), scaling=0.1)
    with emulator.memory(query, key, scores.lengths):
        out = decode.decode_attention(
            query, key, key, scores, gpu=gpu, longest=20, num_splits=num_splits
        )

    expected = decode_reference.decode_attention(query, key, key, scores)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_that_computes_something_else_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(gpu_module.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "__*"))
    source = sources / f"{name}.cu"
    right, wrong = FAULTS[name]
    assert right in source.read_text()
    source.write_text(source.read_text().replace(right, wrong))
    monkeypatch.setattr(gpu_module, "SOURCES", sources)

    with caplog.at_level(logging.INFO):
        assert found(name) is None
        assert found(name) is None

    assert not list((tmp_path / "cubins").iterdir())  # the next process compiles it anew
    reason = f"{name} computes something else than its definition on this GPU"
    assert [record.message for record in caplog.records] == [
        f"PyTorch does the work of the kernel of the operator: {reason}"
    ]
    if name == "adamw":
        assert str(adamw._on_gpu(CPU, ADAMW)) == reason
    monkeypatch.setenv(SWITCH, "required")
    with pytest.raises(KernelError, match=reason):
        found(name)


def test_a_kernel_that_the_driver_does_not_start_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LaunchError("the CUDA driver refuses it")

    monkeypatch.setattr(Driver, "launch", refuse)

    with caplog.at_level(logging.INFO):
        assert found("append") is None

    assert "the operator: the CUDA driver refuses it" in caplog.text
