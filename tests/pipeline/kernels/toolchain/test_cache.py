"""Compiled code is loaded only where no other user can have written it."""

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pipeline.kernels.toolchain import cache as module
from pipeline.kernels.toolchain.cache import CACHE, NOWHERE, cache_directory, is_trusted, why_unsafe
from pipeline.kernels.toolchain.cpp import build, seal
from pipeline.kernels.toolchain.cubins import CubinCache
from tests.distributed import PROCESSES

ALICE, BOB = 21001, 21002
"""Users of the tests, who need no entry in any list."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that every user may enter, with a source of C++ and root's empty home."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory).resolve()
        place.chmod(0o755)
        (place / "answer.cpp").write_text(SOURCE)
        monkeypatch.setenv("HOME", str(place / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(module, "_warn", module._warn.__wrapped__)
        yield place


def shared(place: Path) -> Path:
    """A cache of all users, as an administrator makes it."""
    cache = place / "cache"
    cache.mkdir()
    cache.chmod(0o1777)
    return cache


def answer(place: Path) -> int:
    return build(place / "answer.cpp", {"ANSWER": 42}).library.answer()


def plant(library: Path, number: int, *, owner: int | None = None) -> None:
    """Put a whole library that answers something else where this one is expected."""
    with tempfile.TemporaryDirectory() as directory:
        source, made = Path(directory) / "planted.cpp", Path(directory) / "planted.so"
        source.write_text(f'extern "C" int answer() {{ return {number}; }}\n')
        subprocess.run(["c++", "-shared", "-fPIC", "-o", made, source], check=True)
        seal(made)
        assert ctypes.CDLL(str(made)).answer() == number
        library.parent.mkdir(exist_ok=True)
        shutil.move(made, library)
    if owner is not None:
        os.chown(library, owner, owner)


@as_root
def test_what_another_user_has_planted_in_a_shared_cache_is_not_loaded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = build(place / "answer.cpp", {"ANSWER": 42}).path
    assert own is not None
    cache = shared(place)
    monkeypatch.setenv(CACHE, str(cache))
    plant(cache / own.name, 666, owner=ALICE)

    assert answer(place) == 42


@as_root
def test_a_directory_that_another_user_has_made_in_our_name_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = build(place / "answer.cpp", {"ANSWER": 1}).path
    assert name is not None
    cache = shared(place)
    squatted = cache / f"user-{os.geteuid()}"
    squatted.mkdir()
    plant(squatted / name.name, 666)
    for path in (squatted, squatted / name.name):
        os.chown(path, ALICE, ALICE)
    monkeypatch.setenv(CACHE, str(cache))

    with caplog.at_level(logging.WARNING):
        built = build(place / "answer.cpp", {"ANSWER": 1})

    assert built.library.answer() == 1
    own = place / "home" / ".cache" / "rlhf-pipeline" / "kernels"
    assert built.path is not None
    assert built.path.parent == own
    assert caplog.messages[0] == (
        f"compiled kernels are kept in {own}, and not in {cache} as {CACHE} says, for {squatted}"
        f" belongs to another user (uid {ALICE})"
    )


def test_a_library_that_others_can_write_is_built_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = build(place / "answer.cpp", {"ANSWER": 42}).path
    assert own is not None
    monkeypatch.setenv(CACHE, str(place / "cache"))
    kept = place / "cache" / own.name  # of which the loader knows nothing yet
    plant(kept, 666)
    kept.chmod(0o666)
    kept.parent.chmod(0o700)

    assert answer(place) == 42
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert build(place / "answer.cpp", {"ANSWER": 42}).seconds is None


@as_root
def test_every_user_of_a_shared_cache_gets_kernels_and_keeps_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shared(place)
    monkeypatch.setenv(CACHE, str(cache))
    for user in (ALICE, BOB):
        assert _as_user(user, place, cache) == (42, f"user-{user}", True)
        assert _as_user(user, place, cache) == (42, f"user-{user}", False)
    assert answer(place) == 42
    assert {path.name for path in cache.iterdir()} == {f"user-{n}" for n in (0, ALICE, BOB)}


def _as_user(user: int, place: Path, cache: Path) -> tuple[int, str, bool]:
    """What a user's process gets: the answer, the directory, whether it had to compile."""
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_build_as, args=(user, place, cache, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()
        receiver.close()


def _build_as(user: int, place: Path, cache: Path, sender: Connection) -> None:
    os.environ[CACHE] = str(cache)
    os.environ["HOME"] = "/nonexistent"
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    built = build(place / "answer.cpp", {"ANSWER": 42})
    assert built.path is not None
    sender.send((built.library.answer(), built.path.parent.name, built.seconds is not None))


def test_code_is_safe_where_nobody_else_can_write_on_the_way(place: Path) -> None:
    directory = place / "a" / "b"
    directory.mkdir(parents=True)
    link = place / "link"
    link.symlink_to(directory)
    table = [  # modes of place/a and of place/a/b
        (0o755, 0o700, None),
        (0o755, 0o755, None),
        (0o1777, 0o700, None),  # as /tmp: nobody can rename what is another's
        (0o777, 0o700, "a"),
        (0o755, 0o777, "b"),
        (0o755, 0o775, "b"),
        (0o755, 0o1777, "b"),
    ]
    for above, mode, culprit in table:
        (place / "a").chmod(above)
        directory.chmod(mode)
        for path in (directory, link):
            why = why_unsafe(path)
            assert (why is None) == (culprit is None), (above, mode, why)
            if why is not None:
                assert f"/{culprit} can be written by other users (mode " in why
    assert why_unsafe(place / "not" / "there") is None


@as_root
def test_code_is_safe_where_owner_and_owners_above_are_this_user_or_root(place: Path) -> None:
    directory = place / "a" / "b"
    directory.mkdir(parents=True)
    file = directory / "library"
    file.touch(mode=0o644)
    assert is_trusted(file)
    for path in (place / "a", directory, file):
        os.chown(path, ALICE, ALICE)
        assert not is_trusted(file), path
        os.chown(path, 0, 0)
    (directory / "link").symlink_to(file)
    assert not is_trusted(directory / "link")


def test_a_cache_that_others_can_change_is_not_used(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = place / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv(CACHE, str(cache))
    own = place / "home" / ".cache" / "rlhf-pipeline" / "kernels"
    assert cache_directory() == own

    own.mkdir(parents=True)
    own.chmod(0o777)
    assert cache_directory() == NOWHERE
    monkeypatch.delenv(CACHE)
    assert cache_directory() == NOWHERE
    assert answer(place) == 42
    assert not list(own.iterdir())
    shutil.rmtree(own)
    assert cache_directory() == own


def test_a_cubin_that_others_could_write_is_made_anew(place: Path) -> None:
    cubins = CubinCache(place / "cubins")
    path = cubins.path("fill", ["source"])
    cubins.write(path, b"code")
    assert cubins.read(path) == b"code"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644

    path.chmod(0o666)
    assert cubins.read(path) is None
    path.chmod(0o644)
    (place / "cubins").chmod(0o777)
    assert cubins.read(path) is None
    (place / "cubins").chmod(0o755)
    assert cubins.read(path) == b"code"
    if os.geteuid() == 0:
        os.chown(path, ALICE, ALICE)
        assert cubins.read(path) is None
