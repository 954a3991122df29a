"""The script that measures the CUDA kernels runs from end to end without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import kernels_gpu
from benchmarks.kernel_gates import GATES, gates
from benchmarks.kernels_gpu import main
from benchmarks.kernels_gpu_decode import within_memory
from pipeline.kernels.emulator.emulated import compiler_found


@pytest.mark.jobs
@pytest.mark.skipif(not compiler_found(), reason="the emulator is built by g++")
def test_every_phase_runs_under_the_emulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--backend", "emulator", "--cases", "3", "--output", str(tmp_path)])

    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    phases = [row["phase"] for row in rows]
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert phases.count("correct") == 3 + 4 + 2 + 1  # attention, the cache, the sampler, AdamW
    assert phases.count("decode") == phases.count("compile") == 2
    assert {"environment", "ceilings", "adam", "small", "loop"} <= set(phases)
    assert "10 of 10 gates hold" in printed


@pytest.mark.skipif(not compiler_found(), reason="the emulator is built by g++")
def test_a_phase_without_time_says_how_much_it_left_off_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--phases", "correct", "--budget", "0", "--cases", "3", "--output", str(tmp_path)]
    code = main(["--backend", "emulator", *arguments])

    lines = (tmp_path / "results.jsonl").read_text().splitlines()[1:]
    left_off = [{"phase": "correct", "left_off": number} for number in (1, 4, 2, 3)]
    assert [json.loads(line) for line in lines] == left_off
    assert code == 1
    assert "FAILS: correct: 4 cases were not evaluated" in capsys.readouterr().out


@pytest.mark.parametrize("phase", GATES)
def test_a_phase_that_was_asked_for_and_is_not_evaluated_fails(phase: str) -> None:
    asked = {"phase": "environment", "phases": [phase]}

    assert [holds for _, holds in gates([asked])] == [False]
    assert [holds for _, holds in gates([asked, {"phase": phase, "left_off": 3}])] == [False]


def test_registers_that_the_compiler_said_nothing_of_may_be_spilled() -> None:
    row = {"phase": "compile", "kernel": "adamw", "defines": {}}

    held = [next(gates([row | {"spilled": number}]))[1] for number in (0, 8, None)]

    assert held == [True, False, False]


@pytest.mark.skipif(not compiler_found(), reason="the emulator is built by g++")
def test_a_phase_that_fails_is_a_gate_and_the_others_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such number")

    monkeypatch.setattr(kernels_gpu, "run_adam", fail)

    arguments = ["--phases", "adam", "ceilings", "--output", str(tmp_path)]
    code = main(["--backend", "emulator", *arguments])

    printed = capsys.readouterr().out
    assert code == 1
    assert "FAILS: the phase adam ends without an error: RuntimeError: no such number" in printed
    assert "matrix_product" in printed


def test_a_way_that_needs_too_much_memory_has_no_time() -> None:
    def measure() -> float:
        raise torch.OutOfMemoryError

    assert within_memory(measure) is None
    assert within_memory(lambda: 1.0) == 1.0


def test_a_gate_fails_above_its_number_and_holds_at_it() -> None:
    adam = {"phase": "adam", "vectors": "one", "floor": 1.0, "pytorch": 1.5}
    decode = {"phase": "decode", "model": "m", "batch": 64, "length": 512, "num_splits": None}
    decode |= {"ours": 1.0, "masked": 2.0, "live": 1.0}

    assert [holds for _, holds in gates([adam | {"ours": 1.2}])] == [True, True]
    assert [holds for _, holds in gates([adam | {"ours": 1.21}])] == [False, False]
    assert [holds for _, holds in gates([decode | {"share": 0.75}])] == [True, True]
    assert [holds for _, holds in gates([decode | {"share": 0.74, "live": 0.9}])] == [False, False]
    assert [holds for _, holds in gates([decode | {"length": 128}])] == []
    fits = decode | {"share": 0.75, "masked": None}
    assert [holds for _, holds in gates([fits])] == [True, True]
    assert [holds for _, holds in gates([fits | {"live": None}])] == [True, False]
    small = {"phase": "small", "what": "cache", "pytorch": 1.0}
    assert [holds for _, holds in gates([small | {"ours": 1.0}])] == [True]
    assert [holds for _, holds in gates([small | {"ours": 1.1}])] == [False]
