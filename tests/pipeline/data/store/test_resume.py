import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.data.store.config import PackConfig
from pipeline.data.store.pack import pack
from pipeline.data.store.sources import find_sources
from pipeline.errors import ConfigError
from tests.pipeline.data.store.corpus import byte_vocabulary, save_vocabulary, write_rows

ROOT = Path(__file__).parents[4]
PROGRAM = """
import json, sys
from pathlib import Path
from pipeline.data.store import pieces
from pipeline.data.store.config import PackConfig
from pipeline.data.store.pack import pack
from pipeline.data.store.sources import find_sources
from pipeline.data.store.vocabulary import Vocabulary

source, vocabulary, out, workers = sys.argv[1:]
pieces.PIECE_BYTES = 20000
vocabulary = Vocabulary(**json.loads(Path(vocabulary).read_text()))
config = PackConfig(tokenizer="bytes", out=Path(out), workers=int(workers), resume=True)
pack(find_sources([source]), vocabulary, config)
"""


def start(tmp_path: Path, workers: int) -> subprocess.Popen[bytes]:
    words = [tmp_path / "a.jsonl", tmp_path / "bytes.json", tmp_path / "x.tokens"]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *words, str(workers)], cwd=ROOT)


def pieces_done(tmp_path: Path) -> int:
    journal = tmp_path / "x.tokens.journal"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("workers", "kills"),
    [(1, [1, 7, 20]), (2, [5]), pytest.param(2, [1, 0, 2, 1] * 10, marks=pytest.mark.grid)],
)
def test_a_killed_pack_goes_on_to_the_same_bytes(
    tmp_path: Path, workers: int, kills: list[int]
) -> None:
    """Each kill is some pieces after the program before."""
    write_rows(tmp_path / "a.jsonl", [f"text {n} " + "word " * (n % 50) for n in range(12000)])
    save_vocabulary(byte_vocabulary(), tmp_path / "bytes.json")
    straight = PackConfig(tokenizer="bytes", out=tmp_path / "straight.tokens")
    pack(find_sources([str(tmp_path / "a.jsonl")]), byte_vocabulary(), straight)

    for more in kills:
        seen = pieces_done(tmp_path)
        program = start(tmp_path, workers)
        while program.poll() is None and pieces_done(tmp_path) < seen + more:
            time.sleep(0.001)
        children = psutil.Process(program.pid).children() if program.poll() is None else []
        program.send_signal(signal.SIGKILL)
        assert program.wait() == -signal.SIGKILL
        psutil.wait_procs(children, timeout=20)
        assert not [child for child in children if child.is_running()]
        assert not (tmp_path / "x.tokens").exists()

    assert start(tmp_path, workers).wait() == 0
    assert (tmp_path / "x.tokens").read_bytes() == straight.target.read_bytes()
    assert not list(tmp_path.glob("x.tokens.*"))


def half_packed(tmp_path: Path) -> None:
    """A pack that a bad row in its second file has ended."""
    write_rows(tmp_path / "a.jsonl", ["some", "texts"])
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"b\.jsonl:1"):
        run(tmp_path)
    assert pieces_done(tmp_path) == 2  # the plan, and a.jsonl


def run(tmp_path: Path, *, resume: bool = False) -> bytes:
    config = PackConfig(tokenizer="bytes", out=tmp_path / "x.tokens", resume=resume)
    pack(find_sources([str(tmp_path / "*.jsonl")]), byte_vocabulary(), config)
    return (tmp_path / "x.tokens").read_bytes()


@pytest.mark.parametrize("name", ["x.tokens.writing", "x.tokens.ends"])
@pytest.mark.parametrize("damage", ["flipped", "lost"])
def test_what_the_disk_lost_is_packed_again(tmp_path: Path, name: str, damage: str) -> None:
    """After a power failure a line of the journal can be there without what it speaks of."""
    half_packed(tmp_path)
    times = (tmp_path / "b.jsonl").stat()
    (tmp_path / "b.jsonl").write_text("\n\n\n")
    os.utime(tmp_path / "b.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:-3])

    resumed = run(tmp_path, resume=True)

    (tmp_path / "x.tokens").unlink()
    assert run(tmp_path) == resumed


def test_other_sources_are_not_mixed_in(tmp_path: Path) -> None:
    half_packed(tmp_path)
    write_rows(tmp_path / "a.jsonl", ["other", "texts"])

    with pytest.raises(ConfigError, match="was started with other settings, source files"):
        run(tmp_path, resume=True)
    with pytest.raises(ConfigError, match="is half-written; --resume continues"):
        run(tmp_path)
