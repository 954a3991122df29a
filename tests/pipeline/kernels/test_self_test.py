"""A kernel that is wrong on the GPU at hand is not used there, and the log says so."""

import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import KernelError
from pipeline.kernels import choice
from pipeline.kernels.adamw import dispatch as adamw
from pipeline.kernels.choice import SWITCH, gpu_for
from pipeline.kernels.decode_attention import cuda, definition
from pipeline.kernels.decode_attention.definition import Scores
from pipeline.kernels.emulator.emulated import Emulator
from pipeline.kernels.operators import cases_of, operators
from pipeline.kernels.toolchain.cubins import CubinCache
from pipeline.kernels.toolchain.driver import Driver, LaunchError
from pipeline.kernels.toolchain.gpu import Gpu, Macros
from tests.pipeline.kernels.emulation import plant

CPU = torch.device("cpu")

ADAMW = (torch.float32, torch.float32, None, True)
"""Its kind in bf16 training."""

SHAPE = cuda.Shape(2, 64, 2)


@pytest.fixture(autouse=True)
def emulated(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Operators find the emulated GPU; what they find out is forgotten afterwards."""
    cubins = CubinCache(tmp_path / "cubins")
    monkeypatch.setattr(choice, "gpu_of", lambda _: emulator.gpu(cubins=cubins))
    choice._compiled.cache_clear()
    choice._say_once.cache_clear()
    with emulator.memory():
        yield
    choice._compiled.cache_clear()
    choice._say_once.cache_clear()


def found(name: str, defines: Macros | None = None) -> Gpu | None:
    self_test = import_module(f"pipeline.kernels.{name}.cuda").self_test
    defines = defines or cases_of(name).SPECIALISATIONS[0]
    return gpu_for("the operator", CPU, None, name, defines, self_test)


@pytest.mark.parametrize("name", operators(on_gpu=True))
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
    gpu = found("decode_attention", cuda.specialisation(torch.bfloat16, SHAPE))
    assert gpu is not None

    def load(*_: object) -> int:
        raise AssertionError("loaded again, which a capture forbids")

    monkeypatch.setattr(Driver, "load", load)
    monkeypatch.setattr(Driver, "kernel", load)
    query, key = torch.randn(3, 2, 64).bfloat16(), torch.randn(3, 1, 20, 64).bfloat16()
    scores = Scores(lengths=torch.tensor([20, 1, 7], dtype=torch.int32), scaling=0.1)
    with emulator.memory(query, key, scores.lengths):
        out = cuda.decode_attention(
            query, key, key, scores, gpu=gpu, longest=20, num_splits=num_splits
        )

    expected = definition.decode_attention(query, key, key, scores)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", operators(on_gpu=True))
def test_a_kernel_that_computes_something_else_is_not_used(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = import_module(f"tests.pipeline.kernels.{name}.faults").SEEN_BY_SELF_TEST
    plant(name, fault, tmp_path / "operators", monkeypatch)

    with caplog.at_level(logging.INFO):
        assert found(name) is None
        assert found(name) is None

    assert not list((tmp_path / "cubins").iterdir())  # the next process compiles it again
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
        assert found("cache_append") is None

    assert "the operator: the CUDA driver refuses it" in caplog.text
