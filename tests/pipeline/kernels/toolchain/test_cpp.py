"""Compiled once, whole or not at all, and every way in which it can fail is a sentence."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.errors import KernelError
from pipeline.kernels.adamw.cpu import library
from pipeline.kernels.adamw.definition import AdamW, Weights
from pipeline.kernels.adamw.dispatch import adamw_
from pipeline.kernels.choice import _say_once
from pipeline.kernels.toolchain import cpp as module
from pipeline.kernels.toolchain.cpp import (
    CACHE,
    NotBuiltError,
    build,
    cache_directory,
    is_whole,
)
from tests.pipeline.kernels.adamw.test_adamw import STEP

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def answer(source: Path, number: int = 42) -> int:
    return build(source, {"ANSWER": number}).library.answer()


def test_a_source_is_compiled_once(cache: Path, source: Path) -> None:
    first = build(source, {"ANSWER": 42})
    second = build(source, {"ANSWER": 42})

    assert first.library.answer() == second.library.answer() == 42
    assert first.seconds is not None
    assert second.seconds is None
    assert first.path == second.path
    assert [each.name for each in cache.iterdir()] == [first.path.name if first.path else ""]


def test_another_source_or_macro_is_another_library(cache: Path, source: Path) -> None:
    assert answer(source, 1) == 1
    assert answer(source, 2) == 2
    source.write_text(SOURCE.replace("ANSWER", "ANSWER + 10"))

    assert answer(source, 1) == 11
    assert len(list(cache.iterdir())) == 3


def test_another_header_that_is_included_by_way_of_others_is_another_library(
    cache: Path, tmp_path: Path
) -> None:
    source, header = tmp_path / "operator" / "cpu.cpp", tmp_path / "include" / "more.h"
    for file in (source, header):
        file.parent.mkdir()
    source.write_text('#include "../include/first.h"\n#include <cmath>\n' + SOURCE)
    header.with_name("first.h").write_text('#pragma once\n#include "more.h"\n')
    header.with_name("other.h").write_text("#error nothing includes this\n")
    header.write_text("#define MORE 1\n")
    source.write_text(source.read_text().replace("ANSWER", "ANSWER + MORE"))
    assert answer(source, 1) == 2

    header.write_text("#define MORE 2\n")

    assert answer(source, 1) == 3
    header.with_name("other.h").write_text("#error still nothing\n")
    assert build(source, {"ANSWER": 1}).seconds is None
    assert {each.name.rpartition("-")[0] for each in cache.iterdir()} == {"operator-cpu"}


@pytest.mark.usefixtures("cache")
def test_another_compiler_is_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = build(source, {"ANSWER": 1}).path
    wrapper = tmp_path / "own-c++"
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && echo own 1.0 && exit\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))

    built = build(source, {"ANSWER": 1})

    assert built.compiler == "own 1.0"
    assert built.path != own


@pytest.mark.usefixtures("cache")
def test_a_library_that_was_cut_off_is_built_again(source: Path) -> None:
    path = build(source, {"ANSWER": 42}).path
    assert path is not None
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        cut = path.with_suffix(".cut")
        cut.write_bytes(whole[:length])
        cut.replace(path)
        assert not is_whole(path)

        assert build(source, {"ANSWER": 42}).seconds is not None
        assert is_whole(path)


def test_an_unwritable_cache_costs_a_compilation_and_nothing_else(
    cache: Path, source: Path
) -> None:
    cache.write_text("a file where the directory should be")

    built = build(source, {"ANSWER": 42})

    assert built.library.answer() == 42
    assert built.path is None
    assert cache.is_file()


def test_leftovers_of_killed_builders_are_removed_after_a_day(cache: Path, source: Path) -> None:
    cache.mkdir()
    old, new, of_others = (
        cache / name for name in ("rlhf-kernel-a.tmp", "rlhf-kernel-b.tmp", "thesis.tmp")
    )
    for leftover in (old, new, of_others):
        leftover.touch()
    yesterday = time.time() - 25 * 3600
    for leftover in (old, of_others):
        os.utime(leftover, (yesterday, yesterday))

    answer(source)

    assert not old.exists()
    assert new.exists()
    assert of_others.exists()


def test_a_cache_may_be_named_from_the_working_directory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE, "here/../kept")

    first, second = (build(source, {"ANSWER": 42}) for _ in range(2))

    assert first.path is not None
    assert first.path.exists()
    assert second.seconds is None


@pytest.mark.usefixtures("cache")
def test_words_after_the_compiler_make_another_library(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[Path | None] = []
    for words in ("g++", "g++ -O0"):
        monkeypatch.setenv("CXX", words)
        paths.append(build(source, {"ANSWER": 42}).path)

    assert paths[0] != paths[1]


def test_the_compilers_own_words_are_handed_on(cache: Path, source: Path) -> None:
    source.write_text('extern "C" int answer() { return nonsense; }\n')

    with pytest.raises(
        NotBuiltError, match=r"ended with code 1 and said: .*nonsense.*not declared"
    ):
        answer(source)

    assert list(cache.iterdir()) == []


def compiler_of_its_own(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo own {name} && exit\n{script}\n')
    path.chmod(0o755)


@pytest.mark.usefixtures("cache")
def test_where_one_compiler_fails_the_next_is_tried(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = shutil.which("c++")
    compiler_of_its_own(tmp_path, "c++", "echo error: no >&2; exit 1")
    compiler_of_its_own(tmp_path, "g++", f'exec {working} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    assert build(source, {"ANSWER": 42}).compiler == "own g++"

    # Where all fail the first one's words are told.
    compiler_of_its_own(tmp_path, "g++", "echo error: nor I >&2; exit 1")
    compiler_of_its_own(tmp_path, "clang++", "echo error: nor I >&2; exit 1")
    with pytest.raises(NotBuiltError, match=r"ended with code 1 and said: error: no$"):
        build(source, {"ANSWER": 43})


@pytest.mark.usefixtures("cache")
def test_a_flag_that_the_source_can_do_without_may_be_unknown(source: Path) -> None:
    known = build(source, {"ANSWER": 42}, optional=("-DANSWER=43", "-Wno-error"))
    unknown = build(source, {"ANSWER": 42}, optional=("-mno-such-instruction",))

    assert known.library.answer() == 43
    assert unknown.library.answer() == 42


def test_a_compiler_that_is_not_there_is_named(
    cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(NotBuiltError, match="that CXX names, no-such-compiler, was not found"):
        answer(source)

    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(NotBuiltError, match=r"no C\+\+ compiler was found \(c\+\+, g\+\+, clang"):
        answer(source)


@pytest.mark.usefixtures("cache")
def test_a_library_that_the_system_refuses_is_named(source: Path) -> None:
    path = build(source, {"ANSWER": 42}).path
    assert path is not None
    broken = path.with_name("broken.so")
    broken.write_bytes(b"no library")
    module.seal(broken)

    with pytest.raises(NotBuiltError, match=f"doesn't load .*broken.so .*; set {CACHE} to a"):
        module.load(broken)


def test_a_processor_that_pytorch_knows_no_fused_arithmetic_of_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")

    with pytest.raises(NotBuiltError, match=r"the processor \(x86_64, DEFAULT\) is not one"):
        module.instruction_flags()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "/a")
    assert cache_directory() == Path("/a")
    monkeypatch.delenv(CACHE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_directory() == Path("/b/rlhf-pipeline/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_directory() == Path("/c/.cache/rlhf-pipeline/kernels")


PROGRAM = """
import sys
from pathlib import Path
from pipeline.kernels.toolchain.cpp import build
print("ready", flush=True)
sys.stdin.readline()
print(build(Path(sys.argv[1]), {"ANSWER": 42}).library.answer(), flush=True)
"""


def builder(source: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[4],
        env=os.environ | environment,
    )


@pytest.mark.jobs
def test_processes_that_build_at_once_all_get_it(cache: Path, source: Path) -> None:
    builders = [builder(source, {}) for _ in range(3)]
    for each in builders:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"

    said = [each.communicate("go\n")[0] for each in builders]

    assert said == ["42\n"] * 3
    (library,) = cache.iterdir()
    assert is_whole(library)


def test_a_builder_that_is_killed_leaves_nothing_that_is_taken_for_a_library(
    cache: Path, source: Path, tmp_path: Path
) -> None:
    slow = tmp_path / "slow-c++"
    slow.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\n'
        'for word; do last=$word; done\nprintf half > "$last"\n: > "$0.began"\nsleep 60\n'
    )
    slow.chmod(0o755)
    killed = builder(source, {"CXX": str(slow)})
    assert killed.stdin is not None
    killed.stdin.write("go\n")
    killed.stdin.flush()
    deadline = time.monotonic() + 60
    while not slow.with_name("slow-c++.began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)

    killed.send_signal(signal.SIGKILL)
    killed.communicate()

    assert [each.suffix for each in cache.iterdir()] == [".tmp"]
    assert answer(source) == 42


def test_without_a_compiler_pytorch_does_the_work_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    library.cache_clear()
    _say_once.cache_clear()
    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    weights = Weights(*torch.ones(3, 100))
    try:
        with caplog.at_level(logging.INFO):
            for step in (1, 2, 3):
                adamw_(weights, torch.ones(100), AdamW(**{**vars(STEP), "step": step}))
        with pytest.raises(
            KernelError, match="AdamW can't be had: the compiler that CXX names, no-"
        ):
            adamw_(weights, torch.ones(100), STEP, kernels="required")
    finally:
        library.cache_clear()
        _say_once.cache_clear()

    assert [record.message for record in caplog.records] == [
        "PyTorch does the work of the kernel of AdamW: the compiler that CXX names,"
        " no-such-compiler, was not found"
    ]
    assert weights.master[0] < 1
