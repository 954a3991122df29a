"""Headers of safetensors files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.files.safetensors_header import INDEX, SINGLE, stored_tensors
from pipeline.files.tensor_io import DTYPES, view_bytes
from pipeline.system.errors import ModelError

TENSORS = {
    "table": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "bias": torch.tensor([1.0, -2.5, 3.25], dtype=torch.bfloat16),
    "experts": torch.arange(2 * 3 * 4, dtype=torch.float16).view(2, 3, 4),
    "scalar": torch.tensor(4.0),
    "empty": torch.zeros(0, 3),
    "mask": torch.tensor([True, False]),
}


def save_shards(directory: Path) -> Path:
    """Save two shards and their index, and return the path of the index."""
    weight_map = {}
    for number, names in enumerate((["table", "bias"], ["experts", "scalar", "empty", "mask"])):
        save_file({name: TENSORS[name] for name in names}, directory / f"{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"{number}.safetensors")
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory / INDEX


@pytest.mark.parametrize("in_shards", [False, True])
def test_header_has_positions_shapes_and_dtypes(in_shards: bool, tmp_path: Path) -> None:
    if in_shards:
        save_shards(tmp_path)
    else:
        save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})

    stored = stored_tensors(tmp_path)

    assert stored.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        entry = stored[name]
        content = entry.file.read_bytes()[entry.offset :][: tensor.nbytes]
        assert entry.shape == tuple(tensor.shape)
        assert DTYPES[entry.dtype] == tensor.dtype
        assert content == bytes(view_bytes(tensor.contiguous()))


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
def test_damaged_file_raises_with_its_path(content: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(content)

    with pytest.raises(ModelError, match=f"{tmp_path / SINGLE} can't be read as safetensors"):
        stored_tensors(tmp_path)
