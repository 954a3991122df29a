"""Pieces of stored tensors; sentences for directories that hold none."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.files.weight_files import WeightFiles
from pipeline.system.errors import ModelError

TENSORS = {
    "table": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "bias": torch.tensor([1.0, -2.5, 3.25], dtype=torch.bfloat16),
    "experts": torch.arange(2 * 3 * 4, dtype=torch.float16).view(2, 3, 4),
    "scalar": torch.tensor(4.0),
    "empty": torch.zeros(0, 3),
    "mask": torch.tensor([True, False]),
}


def stored(directory: Path, tensors: dict[str, Tensor] = TENSORS) -> WeightFiles:
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    return WeightFiles(directory)


def sharded(directory: Path) -> Path:
    """Two shards and their index; the path of the index."""
    weight_map = {}
    for number, names in enumerate((["table", "bias"], ["experts", "scalar", "empty", "mask"])):
        save_file({name: TENSORS[name] for name in names}, directory / f"{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"{number}.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory / INDEX


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_every_piece_of_every_tensor_is_what_was_stored(
    name: str, in_shards: bool, tmp_path: Path
) -> None:
    if in_shards:
        sharded(tmp_path)
    files = WeightFiles(tmp_path) if in_shards else stored(tmp_path)
    flat = TENSORS[name].flatten()

    assert sorted(files.names()) == sorted(TENSORS)
    assert files.shape(name) == tuple(TENSORS[name].shape)
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 1):
            piece = files.slice(name, start, stop, dtype=flat.dtype)
            assert piece.dtype == flat.dtype
            assert torch.equal(piece, flat[start:stop])


def test_no_byte_after_a_piece_is_read(tmp_path: Path) -> None:
    files = stored(tmp_path, {"table": TENSORS["table"]})
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(size - 4 * (35 - 12))  # in the middle of the third row

    assert files.slice("table", 8, 12, dtype=torch.float32).tolist() == [8.0, 9.0, 10.0, 11.0]
    with pytest.raises(ModelError, match=r"table can't be read from .*: the file ends at byte"):
        files.slice("table", 8, 13, dtype=torch.float32)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError) as error:
        WeightFiles(tmp_path)

    assert str(error.value) == (
        f"{tmp_path} holds its weights as pytorch_model.bin, a pickle that can run code;"
        " save the model as safetensors first: save_pretrained does"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"\xff" * 16,
        (5).to_bytes(8, "little") + b"{abc}",
        (62).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}       ',
    ],
    ids=["empty", "short", "huge header", "no JSON", "without its data"],
)
def test_a_damaged_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)

    with pytest.raises(ModelError, match=f"{tmp_path / SINGLE} can't be read as safetensors"):
        WeightFiles(tmp_path)
