"""Building C++ kernels: the cache, and every way to fail."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.kernels import build
from pipeline.kernels.build import CACHE, Built, NotBuiltError, cache_directory, found

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    build._warn.cache_clear()
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return path


def answer(source: Path, number: int = 42) -> tuple[int, bool]:
    """What the library returns, and whether it was compiled."""
    built = found(source, {"ANSWER": number})
    assert isinstance(built, Built)
    return built.library.answer(), built.seconds is not None


def test_a_source_is_compiled_once(cache: Path, source: Path) -> None:
    assert [answer(source), answer(source), answer(source, 7)] == [
        (42, True),
        (42, False),
        (7, True),
    ]
    source.write_text(SOURCE.replace("ANSWER", "ANSWER + 1"))
    assert answer(source) == (43, True)
    assert len(list(cache.iterdir())) == 3
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_changed_header_is_another_library(cache: Path, source: Path) -> None:
    header = source.with_name("more.h")
    header.write_text("#define MORE 1\n")
    source.with_name("first.h").write_text('#include "more.h"\n')
    source.write_text('#include "first.h"\n' + SOURCE.replace("ANSWER", "ANSWER + MORE"))
    assert answer(source) == (43, True)
    header.write_text("#define MORE 2\n")

    assert answer(source) == (44, True)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.jobs
def test_processes_that_build_at_once_each_get_a_complete_library(
    cache: Path, source: Path
) -> None:
    program = (
        "import sys; from pathlib import Path; from pipeline.kernels.build import found;"
        "print(found(Path(sys.argv[1]), {'ANSWER': 42}).library.answer())"
    )
    command = [sys.executable, "-c", program, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]

    assert [process.communicate()[0] for process in processes] == [b"42\n"] * 3
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("cache")
def test_what_can_not_be_compiled_is_a_reason(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text("int x")
    assert "error" in str(found(source, {}))
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    reason = found(source, {})
    assert isinstance(reason, NotBuiltError)
    assert str(reason) == "the compiler that CXX names, no-such-compiler, was not found"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler was found" in str(found(source, {}))


@pytest.mark.usefixtures("cache")
def test_processors_without_vectors_are_not_supported(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(build, "is_arm", lambda: False)

    assert "is not x86 with AVX2" in str(found(source, {}))


def test_code_is_not_loaded_from_where_others_can_write(
    cache: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    cache.chmod(0o777)

    assert answer(source) == answer(source) == (42, True)
    assert not list(cache.iterdir())
    assert caplog.text.count("compiled kernels are not kept") == 1


def test_a_directory_of_another_user_has_a_folder_for_each(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    uid = cache.stat().st_uid
    monkeypatch.setattr(build.os, "geteuid", lambda: uid + 1)
    # The folder belongs to this user again, and so not to the one that is pretended.
    assert cache_directory() is None
    assert [path.name for path in cache.iterdir()] == [f"user-{uid + 1}"]


def test_a_directory_that_can_not_be_made_keeps_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(source / "below a file"))

    assert cache_directory() is None
    assert answer(source) == (42, True)


@pytest.mark.parametrize(
    ("limit", "expected"), [("", True), ("AVX2", False), ("AVX512_CORE", False), ("ALL", True)]
)
def test_onednn_can_take_bf16_instructions_away(
    limit: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)

    assert build.multiplies_bf16() is expected
