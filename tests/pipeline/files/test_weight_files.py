"""Pieces of stored tensors; sentences for directories that hold none."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import ModelError
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.files.weight_files import WeightFiles

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


def test_pieces_have_the_wanted_number_format(tmp_path: Path) -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    files = stored(tmp_path, {"weights": weights})

    piece = files.slice("weights", 10, 900, dtype=torch.bfloat16)

    assert torch.equal(piece, weights[10:900].bfloat16())


def test_no_byte_after_a_piece_is_read(tmp_path: Path) -> None:
    files = stored(tmp_path, {"table": TENSORS["table"]})
    size = (tmp_path / SINGLE).stat().st_size
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(size - 4 * (35 - 12))  # in the middle of the third row

    assert files.slice("table", 8, 12, dtype=torch.float32).tolist() == [8.0, 9.0, 10.0, 11.0]
    with pytest.raises(ModelError, match=r"table can't be read from .*: the file ends at byte"):
        files.slice("table", 8, 13, dtype=torch.float32)


def test_there_are_no_elements_beyond_the_last(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=re.escape("table of shape (7, 5) has no elements 3 to 36")
    ):
        stored(tmp_path).slice("table", 3, 36, dtype=torch.float32)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    files = stored(tmp_path, {"q": torch.ones(2).to(torch.float8_e4m3fn)})

    with pytest.raises(ModelError, match=r"q in .* has the number format F8_E4M3; only models"):
        files.slice("q", 0, 1, dtype=torch.float32)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError) as error:
        WeightFiles(tmp_path)

    assert str(error.value) == (
        f"{tmp_path} holds its weights as pytorch_model.bin, a pickle that can run code;"
        " save the model as safetensors first: save_pretrained does"
    )


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path} holds no weights: it has neither"):
        WeightFiles(tmp_path)


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


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "1.safetensors").unlink()

    with pytest.raises(ModelError, match=f"{tmp_path / '1.safetensors'} can't be read"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not an index of safetensors files"),
        ("[]", "is not an index of safetensors files"),
        ('{"weight_map": {"x": "0.safetensors"}}', "says that 0.safetensors holds x, but it doesn"),
        ('{"weight_map": {"x": "../0.safetensors"}}', "names ../0.safetensors, which is outside"),
    ],
)
def test_an_index_that_can_not_be_true_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    sharded(tmp_path).write_text(text)

    with pytest.raises(ModelError, match=re.escape(f"{tmp_path / INDEX} {sentence}")):
        WeightFiles(tmp_path)


def test_the_single_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    sharded(tmp_path)

    files = stored(tmp_path, {"alone": torch.ones(1)})

    assert files.names() == ["alone"]
    assert math.prod(files.shape("alone")) == 1
