"""Exports written while the weights come in load in plain `transformers`, whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline import faults
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.files.weight_files import WeightFiles
from pipeline.models.stream_export import as_saved, stream_export
from pipeline.parallel.mesh import current_mesh
from tests.distributed import run_ranks
from tests.families import FAMILIES, PECULIAR, saved, tiny_causal_lm
from tests.memory import live_bytes
from tests.mixtures import MIXTURES, tiny_mixture


def exported(model: PreTrainedModel, directory: Path, **settings: Any) -> list[str]:
    """Export all that a model has; the names of the directory's weight files."""
    model.config.save_pretrained(directory)
    named = as_saved(model, model.state_dict().items())
    stream_export(named, directory, tied=model.all_tied_weights_keys, **settings)
    return sorted(path.name for path in directory.iterdir() if path.name != "config.json")


def assert_loads_as(model: PreTrainedModel, directory: Path) -> None:
    again, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 10_000])
@pytest.mark.parametrize("family", [*FAMILIES, *PECULIAR])
def test_an_export_loads_in_plain_transformers_with_equal_tensors(
    family: str, max_shard_bytes: int, tmp_path: Path
) -> None:
    model = tiny_causal_lm(family)

    files = exported(model, tmp_path, max_shard_bytes=max_shard_bytes)

    assert (files == [SINGLE]) == (max_shard_bytes > 10_000)
    assert_loads_as(model, tmp_path)


@pytest.mark.parametrize("family", [*FAMILIES, *PECULIAR, *MIXTURES])
def test_the_files_hold_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = tiny_mixture(family) if family in MIXTURES else tiny_causal_lm(family)
    expected = load_file(Path(saved(model, tmp_path / "plain")) / SINGLE)

    exported(model, tmp_path / "streamed")

    written = load_file(tmp_path / "streamed" / SINGLE)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_shards_are_as_large_as_they_may_be_and_the_index_counts_them(tmp_path: Path) -> None:
    named = [(f"w{index}", torch.full((25,), float(index))) for index in range(5)]

    stream_export(named, tmp_path, max_shard_bytes=200, metadata={"origin": "test"})

    index = json.loads((tmp_path / INDEX).read_text())
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["metadata"] == {"total_size": 500, "total_parameters": 125}
    assert list(index["weight_map"].values()) == [shards[number // 2] for number in range(5)]
    for shard in shards:
        with safe_open(tmp_path / shard, framework="pt") as file:
            assert file.metadata() == {"origin": "test", "format": "pt"}


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    sizes = {"small": 1, "large": 100, "last": 1}

    stream_export([(n, torch.ones(s)) for n, s in sizes.items()], tmp_path, max_shard_bytes=16)

    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) == 3


def test_no_more_than_one_shard_and_the_tensor_that_comes_are_in_memory(tmp_path: Path) -> None:
    numel, nbytes = 10_000, 40_000
    start, most = live_bytes(), 0

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for index in range(9):
            made = [torch.full((numel,), float(index))]
            most = max(most, live_bytes() - start)
            yield f"w{index}", made.pop()

    stream_export(weights(), tmp_path, max_shard_bytes=4 * nbytes)

    assert len(list(tmp_path.glob("model-*"))) == 3
    assert most == (4 + 1) * nbytes


def test_a_buffer_may_be_filled_anew_for_every_tensor(tmp_path: Path) -> None:
    buffer = torch.empty(4, 6)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for index in range(3):
            yield f"w{index}", buffer.fill_(index).t()
        buffer.fill_(-1)

    stream_export(weights(), tmp_path)

    for index, (name, tensor) in enumerate(sorted(load_file(tmp_path / SINGLE).items())):
        assert (name, tensor.shape) == (f"w{index}", (6, 4))
        assert tensor.unique().tolist() == [index]


def test_a_name_comes_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a came twice"):
        stream_export([("a", torch.ones(1)), ("a", torch.ones(1))], tmp_path)


def generation(value: float, *, shards: int) -> tuple[list[tuple[str, Tensor]], int]:
    """Six weights of one value, and the shard size that makes `shards` files of them."""
    return [(f"w{index}", torch.full((10,), value)) for index in range(6)], 240 // shards


def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    old, size = generation(1.0, shards=3)
    stream_export(old, tmp_path, max_shard_bytes=size)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fails() -> Iterator[tuple[str, Tensor]]:
        yield from generation(2.0, shards=3)[0][:4]
        raise RuntimeError("a process died")

    with pytest.raises(RuntimeError, match="a process died"):
        stream_export(fails(), tmp_path, max_shard_bytes=size)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("new_shards", [1, 2, 3])
@pytest.mark.parametrize("old_shards", [1, 3])
def test_an_export_killed_at_any_moment_leaves_no_mixture(
    old_shards: int, new_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, old_size = generation(1.0, shards=old_shards)
    new, new_size = generation(2.0, shards=new_shards)
    stream_export(old, tmp_path / "old", max_shard_bytes=old_size)
    outcomes = []

    for moment in range(20):
        directory = tmp_path / f"killed at {moment}"
        shutil.copytree(tmp_path / "old", directory)
        left = moment
        with monkeypatch.context() as patch:
            for change in ("replace", "unlink"):
                real = getattr(Path, change)

                def killing(path: Path, *args: Any, real: Any = real, **kwargs: Any) -> Any:
                    nonlocal left
                    if left == 0:
                        raise Killed
                    left -= 1
                    return real(path, *args, **kwargs)

                patch.setattr(Path, change, killing)
            try:
                stream_export(new, directory, max_shard_bytes=new_size)
            except Killed:
                pass
            else:
                outcomes.append("done")
        outcomes.append(values(directory))
        if "done" in outcomes:
            break

    assert outcomes[0] == 1.0
    assert set(outcomes) <= {1.0, 2.0, None, "done"}
    assert outcomes[-2:] == ["done", 2.0]
    names = {path.name for path in directory.iterdir()}
    assert len(names) == (1 if new_shards == 1 else new_shards + 1)


def values(directory: Path) -> float | None:
    """The one value of all weights in a directory; None where it holds no weights."""
    if not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return None
    files = WeightFiles(directory)
    pieces = [files.slice(name, 0, 10, dtype=torch.float32) for name in files.names()]
    (value,) = torch.stack(pieces).unique().tolist()
    return value


def export_together(directory: Path, fault: str | None) -> str:
    """How it ends on this process, of six tensors in six shards."""
    faults._text = fault
    os.environ["RANK"] = str(current_mesh().world.rank)
    named, size = generation(2.0, shards=6)
    try:
        stream_export(named, directory, max_shard_bytes=size, group=current_mesh().world)
    except OSError as error:
        return str(error)
    return "done"


@pytest.mark.jobs
@pytest.mark.parametrize("processes", [2, 4])
def test_however_many_processes_write_the_files_are_the_same(
    processes: int, tmp_path: Path
) -> None:
    named, size = generation(2.0, shards=6)
    stream_export(named, tmp_path / "one", max_shard_bytes=size)

    ends = run_ranks(export_together, tmp_path / "more", None, world_size=processes)

    assert ends == ["done"] * processes
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "more")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 7


@pytest.mark.jobs
def test_a_process_that_can_not_write_its_shard_leaves_the_old_export_and_all_say_so(
    tmp_path: Path,
) -> None:
    old, size = generation(1.0, shards=3)
    stream_export(old, tmp_path, max_shard_bytes=size)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    first, second = run_ranks(export_together, tmp_path, "export.before_shard:1:2:enospc")

    assert second == "[Errno 28] No space left on device"
    assert first == f"rank 1 can't write to {tmp_path}: {second}"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.jobs
def test_a_process_that_is_killed_while_it_writes_leaves_the_old_export(tmp_path: Path) -> None:
    old, size = generation(1.0, shards=3)
    stream_export(old, tmp_path, max_shard_bytes=size)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fault = "export.before_shard:1:2:kill"

    run_ranks(export_together_or_give_up, tmp_path, fault, may_die=(0, 1))

    kept = [path for path in tmp_path.iterdir() if not path.name.startswith(".writing-")]
    assert {path.name: path.read_bytes() for path in kept} == before


def export_together_or_give_up(directory: Path, fault: str) -> str:
    try:
        return export_together(directory, fault)
    except RuntimeError:  # of the collective that the other one did not come to
        return "given up"
