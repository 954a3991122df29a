"""Missing and damaged files of a model directory raise one-sentence errors."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pipeline.demo.model import build_tokenizer
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.models.hf.directory import check_model_directory
from pipeline.models.hf.load import load_for_inference
from pipeline.system.errors import ModelError
from tests.commands import run_command
from tests.families import tiny_causal_lm

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"

Damage = Callable[[Path], object]


def save_model(directory: Path, *, shards: bool = False) -> Path:
    model = tiny_causal_lm("llama", vocab_size=len(build_tokenizer()))
    model.save_pretrained(directory, **({"max_shard_size": "40KB"} if shards else {}))
    build_tokenizer().save_pretrained(directory)
    return directory


def write(name: str, text: str) -> Damage:
    return lambda directory: (directory / name).write_text(text)


def remove(*patterns: str) -> Damage:
    return lambda directory: [
        file.unlink() for pattern in patterns for file in list(directory.glob(pattern))
    ]


def configure(**settings: object) -> Damage:
    def damage(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return damage


def add_missing_tensor_to_index(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00004.safetensors"
    (directory / INDEX).write_text(json.dumps(index))


def leave_only_an_adapter(directory: Path) -> None:
    remove("*")(directory)
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')


def fill(value: float) -> Damage:
    def damage(directory: Path) -> None:
        tensors = load_file(directory / SINGLE)
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})

    return damage


DAMAGED_FILES: list[tuple[Damage, str]] = [
    (write(SINGLE, POINTER), "model.safetensors is a Git LFS pointer"),
    (write("tokenizer.json", POINTER), "tokenizer.json is a Git LFS pointer"),
    (lambda d: os.truncate(d / SINGLE, 30_000), "model.safetensors can't be read"),
    (lambda d: (d / SINGLE).write_bytes(b"\x8f" * 5000), "model.safetensors can't be read"),
    (write("config.json", "[" * 5000 + "]" * 5000), "config.json is not JSON"),
    (write("config.json", "{'a': 1}"), "config.json is not JSON"),
    (write("config.json", "{}"), "config.json has no model_type"),
    (configure(dtype="float8"), "config.json has dtype float8, not one of float32, "),
    (configure(quantization_config={"quant_method": "gptq"}), "in the quantized format gptq"),
    (remove("config.json"), "has no config.json"),
    (remove("*"), "the directory is empty"),
    (remove(SINGLE), "has no weights"),
    (remove("tokenizer*"), "has no tokenizer"),
    (write("tokenizer.json", "{"), "tokenizer.json is not JSON"),
    (write("adapter_config.json", "{}"), "contains both a model and an adapter"),
    (leave_only_an_adapter, "contains an adapter without its base model, me/base"),
]
"""How a directory is damaged, and a part of the message."""

DAMAGED_SHARDS: list[tuple[Damage, str]] = [
    (remove("model-00002-*"), "model-00002-of-00004.safetensors can't be read"),
    (write("model-00002-of-00004.safetensors", POINTER), "is a Git LFS pointer"),
    (remove(INDEX), "has no weights"),
    (write(INDEX, "{"), f"{INDEX} is not an index"),
    (write(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'), "which is outside"),
    (add_missing_tensor_to_index, "lists ghost"),
]


def get_error(call: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_missing_and_damaged_files_raise_before_loading(shards: bool, tmp_path: Path) -> None:
    intact = save_model(tmp_path / "whole", shards=shards)
    check_model_directory(intact)
    for number, (damage, message) in enumerate(DAMAGED_SHARDS if shards else DAMAGED_FILES):
        directory = Path(shutil.copytree(intact, tmp_path / str(number)))
        damage(directory)
        for call in (check_model_directory, load_for_inference):
            error = get_error(lambda call=call, directory=directory: call(directory))
            assert message in error
            assert str(directory) in error


def test_file_without_one_of_the_weights_raises(tmp_path: Path) -> None:
    file, name = save_model(tmp_path) / SINGLE, "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in load_file(file).items() if k != name}, file, {"format": "pt"})

    assert f"lacks 1 of the model's weights, such as {name};" in get_error(
        lambda: load_for_inference(tmp_path)
    )


@pytest.mark.jobs
def test_command_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    directory = save_model(tmp_path)
    fill(float("nan"))(directory)

    process = run_command("chat.py", "--path", str(directory))

    assert process.returncode == 2, process.stderr
    assert process.stderr.strip().split("\n")[-1].startswith("error: ")
    assert "or download it again\n" in process.stderr  # no hint at the range of fp16
    assert "Traceback" not in process.stderr
