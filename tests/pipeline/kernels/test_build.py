"""Building C++ kernels, and the cache of libraries."""

import os
from pathlib import Path

import pytest

from pipeline.kernels import build
from pipeline.kernels.build import CACHE, Library
from tests.distributed import run_ranks

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


def answer(source: Path, number: int = 42) -> int:
    """Build the library and return the result of its function."""
    built = build.build(source, {"ANSWER": number})
    assert isinstance(built, Library)
    return built.answer()


def answer_with_cache(cache: str, source: Path) -> int:
    os.environ[CACHE] = cache
    return answer(source)


def test_source_is_compiled_once(cache: Path, source: Path) -> None:
    assert answer(source) == 42
    (library,) = cache.iterdir()
    modified = library.stat().st_mtime_ns
    assert [answer(source), answer(source, 7)] == [42, 7]
    assert library.stat().st_mtime_ns == modified
    source.write_text(SOURCE.replace("ANSWER", "ANSWER + 1"))
    assert answer(source) == 43
    assert len(list(cache.iterdir())) == 3
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.jobs
def test_concurrent_builds_each_get_a_complete_library(cache: Path, source: Path) -> None:
    assert run_ranks(answer_with_cache, str(cache), source, world_size=3) == [42] * 3
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(("mode", "is_foreign"), [(0o770, False), (0o707, False), (0o700, True)])
def test_cache_of_or_writable_by_others_is_not_used(
    mode: int, is_foreign: bool, cache: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    cache.chmod(mode)
    if is_foreign and os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    if is_foreign:
        os.chown(cache, 1, -1)
    reason = "belongs to another user" if is_foreign else "is writable by other users"

    assert answer(source) == answer(source) == 42
    assert not list(cache.iterdir())
    assert caplog.text.count(f"compiled kernels are not cached: {cache} {reason}; set") == 1
