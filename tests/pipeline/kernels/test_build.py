"""Building C++ kernels: the cache, and every way to fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.kernels import build
from pipeline.kernels.build import CACHE, Built, cache_directory, found

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
    """Return the result of the library, and whether it was compiled."""
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
