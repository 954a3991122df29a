"""Exports written while the weights come in load in plain `transformers`, whole or not at all."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.files.weight_files import WeightFiles
from pipeline.models.export import as_saved, stream_export
from tests.families import PECULIAR, tiny_causal_lm
from tests.memory import live_bytes


def exported(model: PreTrainedModel, directory: Path, **settings: Any) -> list[str]:
    """Export all that a model has; the names of the directory's weight files."""
    model.config.save_pretrained(directory)
    state = model.state_dict().items()
    named = [(name, each) for name, each in state if name not in model.all_tied_weights_keys]
    stream_export(as_saved(model, named), directory, **settings)
    return sorted(path.name for path in directory.iterdir() if path.name != "config.json")


def assert_loads_as(model: PreTrainedModel, directory: Path) -> None:
    again, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt2", *PECULIAR])
def test_shards_load_in_plain_transformers_with_equal_tensors(family: str, tmp_path: Path) -> None:
    model = tiny_causal_lm(family)

    files = exported(model, tmp_path, max_shard_bytes=10_000)

    assert len(files) > 2
    assert_loads_as(model, tmp_path)


def test_shards_are_as_large_as_they_may_be_and_the_index_counts_them(tmp_path: Path) -> None:
    named = [(f"w{index}", torch.full((25,), float(index))) for index in range(5)]

    stream_export(named, tmp_path, max_shard_bytes=200)

    index = json.loads((tmp_path / INDEX).read_text())
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["metadata"] == {"total_size": 500, "total_parameters": 125}
    assert list(index["weight_map"].values()) == [shards[number // 2] for number in range(5)]


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
