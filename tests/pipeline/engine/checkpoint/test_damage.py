"""What is damaged, forged or made to attack is refused by name, and the one before is offered."""

import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.engine.checkpoint.checkpoint import Checkpoint
from pipeline.engine.checkpoint.find import candidates, newest
from pipeline.errors import CheckpointError
from tests.pipeline.engine.checkpoint.saving import (
    assert_holds,
    fragments,
    save,
    sealed,
    visible,
    writer,
)

FILE = "rank-00000-of-00001.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2."""
    save(tmp_path, 1, 2)
    return tmp_path


def refusal(path: Path) -> str:
    """Why a checkpoint is not used."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path).verify()
    return str(caught.value)


def assert_falls_back(root: Path) -> str:
    """Step 1 is offered; the sentence about step 2."""
    checkpoint, passed_over = newest(root)
    assert checkpoint is not None
    assert_holds(checkpoint, 1)
    (sentence,) = passed_over
    assert sentence == f"step_00000002 can't be used: {refusal(root / 'step_00000002')}"
    return sentence


def flip(file: Path, position: int, bit: int = 0) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1 << bit
    file.write_bytes(content)


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def forge(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and make its checksum right again."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    content.pop("crc32", None)
    path.write_bytes(sealed(json.dumps(content)))


def forge_file(directory: Path, content: bytes, *, header: int | None = None) -> None:
    """Put other content in the file, and tell the manifest."""
    (directory / FILE).write_bytes(content)
    length = 8 + int.from_bytes(content[:8], "little") if header is None else header

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][FILE]["bytes"] = len(content)
        manifest["files"][FILE]["header_crc32"] = f"{zlib.crc32(content[:length]):08x}"

    forge(directory, change)


def test_a_flipped_bit_in_a_fragment_is_found_by_file_and_key(root: Path) -> None:
    file = root / "step_00000002" / FILE

    flip(file, file.stat().st_size - 20)

    Checkpoint.open(file.parent)  # reads no fragment
    assert assert_falls_back(root).endswith(
        f"actor/w|0:10000 in {file} is damaged: it is not what its CRC-32 says"
    )


def test_no_flipped_bit_anywhere_goes_unnoticed(root: Path) -> None:
    choose = random.Random(0)
    unharmed = root.parent / "unharmed"
    shutil.copytree(root / "step_00000002", unharmed)
    before = Checkpoint.open(unharmed).manifest
    harmless = 0

    for _ in range(150):
        shutil.copytree(unharmed, root / "step_00000002", dirs_exist_ok=True)
        file = root / "step_00000002" / choose.choice([FILE, "manifest.json"])
        head = choose.random() < 0.5  # half of them where the header is
        size = file.stat().st_size
        flip(file, choose.randrange(min(500, size) if head else size), choose.randrange(8))
        try:
            checkpoint = Checkpoint.open(file.parent)
            checkpoint.verify()
        except CheckpointError:
            continue
        harmless += 1  # the case of a hexadecimal digit of the checksum itself
        assert checkpoint.manifest == before
    assert harmless < 10


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        (FILE, lambda file: os.truncate(file, 20_000), "has 20,000 bytes instead of 44,103"),
        (FILE, lambda file: os.truncate(file, 0), "has 0 bytes instead of 44,103"),
        (FILE, Path.unlink, "is missing"),
        (FILE, append, "has 44,104 bytes instead of 44,103"),
        ("manifest.json", lambda file: os.truncate(file, 100), "is not a manifest: "),
        ("manifest.json", lambda file: os.truncate(file, 0), "is not a manifest: "),
        ("manifest.json", Path.unlink, "is not a whole checkpoint"),
        ("manifest.json", lambda file: file.write_bytes(b"\xff\x00"), "is not a manifest: "),
        ("manifest.json", lambda file: file.write_text("[1]"), "it holds no mapping"),
        ("manifest.json", lambda file: file.write_text("[" * 99_999), "is not a manifest: "),
        ("manifest.json", lambda file: file.write_text("{}"), "has format None"),
    ],
)
def test_a_file_that_is_cut_off_missing_or_garbage_is_refused_by_name(
    name: str, damage: Callable[[Path], object], sentence: str, root: Path
) -> None:
    file = root / "step_00000002" / name

    damage(file)

    assert f"{file} " in assert_falls_back(root)
    assert sentence in refusal(file.parent)


def set_field(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_field("format", 3), "has format 3; this version of the program reads formats 1 and 2"),
        (set_field("extra", 1), "lacks or has too much: extra"),
        (lambda manifest: manifest.pop("state"), "lacks or has too much: state"),
        (set_field("step", "2"), "step is '2'"),
        (set_field("files", {}), "names no files"),
        (set_field("files", {"../x": {}}), "names the file '../x'; those of a checkpoint"),
        (set_field("files", {"/etc/passwd": {}}), "names the file '/etc/passwd'"),
        (set_field("files", {FILE: 1}), "is not a manifest"),
        (set_field("files", {FILE: {"bytes": 44_103}}), "is not a manifest"),
        (set_field("base", "../base-1"), "names '../base-1', which is not a directory of frozen"),
        (set_field("base", 3), "names 3, which is not a directory of frozen"),
        (set_field("base", "base-1"), "base-1/manifest.json is missing"),
        (
            lambda manifest: manifest["files"][FILE].update(fragments={}),
            "holds other fragments than the manifest says",
        ),
    ],
)
def test_a_manifest_that_lies_is_refused_although_its_checksum_is_right(
    change: Callable[[dict[str, Any]], object], sentence: str, root: Path
) -> None:
    forge(root / "step_00000002", change)

    assert sentence in assert_falls_back(root)


def test_a_changed_manifest_is_refused(root: Path) -> None:
    path = root / "step_00000002" / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))

    assert assert_falls_back(root).endswith(f"{path} is damaged: it is not what its CRC-32 says")


def tensors(*, checksums: str | None = None, **entries: object) -> bytes:
    """A file with this header and 16 bytes of tensors."""
    metadata = {} if checksums is None else {"__metadata__": {"crc32": checksums}}
    text = json.dumps(metadata | entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    "content",
    [
        (2**40).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") + bytes(100),
        (2).to_bytes(8, "little") + b"[]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        b"short",
        tensors(a=entry("F32", [4], [0, 2**40])),
        tensors(a=entry("F32", [2**60], [0, 16])),
        tensors(a=entry("F32", [-4], [0, 16])),
        tensors(a=entry("F32", [4], [-16, 0])),
        tensors(a=entry("F32", [2], [0, 8])),
        tensors(a=entry("F32", [4], [0, 16]), b=entry("F32", [4], [0, 16])),
        tensors(a=entry("F32", [2, 2], [0, 16])),
        tensors(a=entry("F3", [4], [0, 16])),
        tensors(a=entry(["F32"], [4], [0, 16])),
        tensors(a=entry("F32", "4", [0, 16])),
        tensors(a=entry("F32", [4.0], [0, 16])),
        tensors(a=3),
        tensors(a=entry("F32", [4], [0, 16])),  # whole, but without a checksum
        tensors(checksums="00000000 00000000", **{"a|0:4": entry("F32", [4], [0, 16])}),
        tensors(checksums="x", **{"a|0:4": entry("F32", [4], [0, 16])}),
    ],
)
def test_a_forged_file_is_refused_by_name(content: bytes, root: Path) -> None:
    forge_file(root / "step_00000002", content)

    assert str(root / "step_00000002" / FILE) in assert_falls_back(root)


class Attack:
    """Runs a command where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.canary}",)


def test_a_pickle_in_disguise_runs_nothing(root: Path) -> None:
    canary = root / "canary"
    attack = Attack(canary)
    torch.save(attack, root / "attack.pt")

    for content in (pickle.dumps(attack), (root / "attack.pt").read_bytes()):
        forge_file(root / "step_00000002", content, header=8)
        assert "is not a safetensors file" in assert_falls_back(root)
        forge(root / "step_00000002", set_field("state", {"__reduce__": str(content)}))
        assert_falls_back(root)

    assert not canary.exists()
    pickle.loads(pickle.dumps(attack))  # noqa: S301  # it would have
    assert canary.exists()


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_a_pipe_instead_of_a_file_hangs_nobody(name: str, root: Path) -> None:
    file = root / "step_00000002" / name
    file.unlink()
    os.mkfifo(file)

    assert f"{file} is missing" in assert_falls_back(root)


@pytest.mark.parametrize(
    "content", [None, "", "step_0000", "step_00000009", "../step_00000002", "step_00000002\0", "é"]
)
def test_without_a_latest_that_names_one_the_newest_is_offered(
    content: str | None, root: Path
) -> None:
    (root / "latest").unlink()
    if content is not None:
        (root / "latest").write_text(content)

    checkpoint, passed_over = newest(root)

    assert checkpoint is not None
    assert_holds(checkpoint, 2)
    assert not passed_over


def test_a_latest_that_is_no_text_is_ignored(root: Path) -> None:
    (root / "latest").write_bytes(b"\xff\xfe")

    assert [path.name for path in candidates(root)] == ["step_00000002", "step_00000001"]


def test_what_a_run_left_behind_by_resuming_earlier_is_tried_last(root: Path) -> None:
    save(root, 3, 4, job="third")
    (root / "latest").write_text("step_00000003\n")
    (root / ".writing-step_00000005-job.1").mkdir()

    assert [path.name for path in candidates(root)] == ["step_00000003", "step_00000004"]


def test_where_nothing_is_there_is_nothing_to_offer(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert newest(tmp_path / "nowhere") == (None, [])


def test_a_damaged_checkpoint_is_written_again_when_its_step_comes(root: Path) -> None:
    flip(root / "step_00000002" / FILE, 44_000)

    save(root, 2, job="next")

    checkpoint, passed_over = newest(root)
    assert checkpoint is not None
    assert_holds(checkpoint, 2)
    assert not passed_over
    assert visible(root) == ["latest", "step_00000001", "step_00000002"]


def test_a_whole_one_with_the_same_content_is_not_replaced(root: Path) -> None:
    inode = (root / "step_00000002").stat().st_ino

    save(root, 2, job="next")
    assert (root / "step_00000002").stat().st_ino == inode

    saver = writer(root, job="other")
    saver.save(2, fragments(2), {"step": 2, "learning_rate": 0.1})
    saver.close()
    assert (root / "step_00000002").stat().st_ino != inode
    assert visible(root) == ["latest", "step_00000001", "step_00000002"]


def test_damaged_ones_do_not_count_among_those_that_are_kept(root: Path) -> None:
    flip(root / "step_00000002" / FILE, 44_000)

    save(root, 3, job="next")

    assert visible(root) == ["latest", "step_00000001", "step_00000002", "step_00000003"]
    save(root, 4, job="later")
    assert visible(root) == ["latest", "step_00000003", "step_00000004"]


def test_saving_an_earlier_step_leaves_the_later_ones(root: Path) -> None:
    save(root, 3, 4, job="first")

    save(root, 1, job="earlier")

    assert visible(root) == ["latest", "step_00000001", "step_00000003", "step_00000004"]
    assert_holds(newest(root)[0], 1)
