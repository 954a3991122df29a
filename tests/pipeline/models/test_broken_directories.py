"""What is missing or broken in a model's directory is said in one sentence, by the file's name."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import FrozenModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.errors import ModelError
from pipeline.files.safetensors_header import INDEX, SINGLE
from pipeline.models.directory import check_model_directory
from pipeline.models.load import load_causal_lm, load_classifier, load_for_inference
from pipeline.models.scores import require_score
from tests.families import saved, tiny_causal_lm

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"
NESTED = "[" * 5000 + "]" * 5000


def healthy(directory: Path, *, shards: bool = False) -> Path:
    model = tiny_causal_lm("llama", vocab_size=len(build_tokenizer()))
    model.save_pretrained(directory, **({"max_shard_size": "40KB"} if shards else {}))
    build_tokenizer().save_pretrained(directory)
    return directory


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def remove(*patterns: str) -> Callable[[Path], object]:
    return lambda directory: [
        file.unlink() for pattern in patterns for file in list(directory.glob(pattern))
    ]


def change(**settings: object) -> Callable[[Path], object]:
    def of(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | settings))

    return of


def cut_short(directory: Path) -> None:
    os.truncate(directory / SINGLE, 30_000)


def missing_shard(directory: Path) -> None:
    sorted(directory.glob("model-*.safetensors"))[1].unlink()


def tensor_in_no_shard(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00004.safetensors"
    (directory / INDEX).write_text(json.dumps(index))


def only_an_adapter(directory: Path) -> None:
    remove("*")(directory)
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "me/base"}')


def fill(value: float) -> Callable[[Path], object]:
    def of(directory: Path) -> None:
        tensors = load_file(directory / SINGLE)
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})

    return of


IN_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights are a pointer": (
        write(SINGLE, POINTER),
        "{}/model.safetensors is a Git-LFS pointer, not the file itself; run `git lfs pull` in {}",
    ),
    "the tokenizer is a pointer": (
        write("tokenizer.json", POINTER),
        "{}/tokenizer.json is a Git-LFS pointer, not the file itself; run `git lfs pull` in {}",
    ),
    "weights were copied in part": (
        cut_short,
        "{}/model.safetensors can't be read as safetensors: it ends at byte 30000 of",
    ),
    "weights are garbage": (
        lambda d: (d / SINGLE).write_bytes(b"\x8f" * 5000),
        "{}/model.safetensors can't be read as safetensors: it does not begin as such a file does",
    ),
    "config.json has 5,000 lists": (
        write("config.json", NESTED),
        "{}/config.json is nested too deep to be read",
    ),
    "config.json is not JSON": (write("config.json", "{'a': 1}"), "{}/config.json is not JSON (E"),
    "config.json names no type": (
        write("config.json", "{}"),
        "{}/config.json says no model_type",
    ),
    "without a configuration": (
        remove("config.json"),
        "{} holds no model: it has no config.json; copy it from where the weights came from",
    ),
    "an empty directory": (
        remove("*"),
        "{} holds no model: it has no config.json; the directory is empty",
    ),
    "without weights": (
        remove(SINGLE),
        "{} holds no weights: it has neither model.safetensors nor model.safetensors.index.json;",
    ),
    "without a tokenizer": (
        remove("tokenizer*"),
        "{} holds no tokenizer: it has neither tokenizer.json nor tokenizer.model;",
    ),
    "tokenizer.json is not JSON": (write("tokenizer.json", "{"), "{}/tokenizer.json is not JSON"),
    "only an adapter": (
        only_an_adapter,
        "{} holds an adapter without the model that it changes, me/base; merge them with peft's",
    ),
}
"""What the files alone show: how it is made, and how the sentence begins; {} is the directory."""

IN_SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (missing_shard, "/model-00002-of-00004.safetensors can't be read: model"),
    "a shard is a pointer": (
        write("model-00002-of-00004.safetensors", POINTER),
        "/model-00002-of-00004.safetensors is a Git-LFS pointer",
    ),
    "shards without their index": (
        remove(INDEX),
        " holds no weights: it has neither model.safetensors nor model.safetensors.index.json,"
        " only model-00001-of-00004.safetensors; copy the missing file",
    ),
    "the index is not JSON": (write(INDEX, "{"), f"/{INDEX} is not an index of safetensors files"),
    "the index names a file elsewhere": (
        write(INDEX, '{"weight_map": {"a": "../x.safetensors"}}'),
        f"/{INDEX} names ../x.safetensors, which is outside",
    ),
    "a tensor is in no shard": (
        tensor_in_no_shard,
        f"/{INDEX} says that model-00001-of-00004.safetensors holds ghost, but it doesn't",
    ),
}

WHEN_LOADED: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights of another size": (
        change(intermediate_size=64),
        "holds model.layers.0.mlp.down_proj.weight of shape (32, 48), but the model of its"
        " config.json has",
    ),
    "fewer layers than the configuration": (
        change(num_hidden_layers=3),
        "lacks 9 of the model's weights, model.layers.2.",
    ),
    "an unknown architecture": (change(model_type="nosuch"), "has model type `nosuch`"),
    "a weight is NaN": (
        fill(float("nan")),
        "model.layers.1.mlp.up_proj.weight holds NaN or infinity; the model is damaged",
    ),
    "a tokenizer of nothing": (
        write("tokenizer.json", "{}"),
        "the tokenizer of ",
    ),
}


def test_the_files_alone_show_what_is_missing_or_broken(tmp_path: Path) -> None:
    wrong: list[str] = []
    whole, shards = healthy(tmp_path / "whole"), healthy(tmp_path / "shards", shards=True)
    for directory in (whole, shards):
        check_model_directory(directory)
    for number, (case, (spoil, begins)) in enumerate(IN_FILES.items()):
        directory = Path(shutil.copytree(whole, tmp_path / str(number)))
        spoil(directory)
        expected = begins.replace("{}", str(directory))
        wrong += said_otherwise(case, lambda d=directory: check_model_directory(d), expected)
        wrong += said_otherwise(case, lambda d=directory: load_for_inference(d), expected)
    for number, (case, (spoil, begins)) in enumerate(IN_SHARDS.items()):
        directory = Path(shutil.copytree(shards, tmp_path / f"shards{number}"))
        spoil(directory)
        expected = f"{directory}{begins}"
        wrong += said_otherwise(case, lambda d=directory: check_model_directory(d), expected)
        wrong += said_otherwise(case, lambda d=directory: load_for_inference(d), expected)

    assert not wrong, "\n".join(wrong)


def said_otherwise(case: str, call: Callable[[], object], expected: str) -> list[str]:
    """What is wrong with the sentence that `call` raises; nothing where it begins as expected."""
    try:
        call()
    except ModelError as error:
        if str(error).startswith(expected) and "\n" not in str(error):
            return []
        return [f"{case}: {error}"]
    return [f"{case}: nothing is wrong, it says"]


@pytest.mark.parametrize("defer", [False, True], ids=["whole", "deferred"])
def test_what_only_the_model_can_tell_is_one_sentence_too(defer: bool, tmp_path: Path) -> None:
    wrong: list[str] = []
    whole = healthy(tmp_path / "whole")
    for number, (case, (spoil, part)) in enumerate(WHEN_LOADED.items()):
        directory = Path(shutil.copytree(whole, tmp_path / str(number)))
        spoil(directory)
        try:
            if "tokenizer" in case:
                load_for_inference(directory)
            model = load_causal_lm(FrozenModelConfig(path=str(directory)), device=CPU, defer=defer)
            for param in model.parameters():
                param.read(0, param.numel())  # pyright: ignore[reportAttributeAccessIssue]
            wrong.append(f"{case}: nothing is wrong, it says")
        except ModelError as error:
            sentence = str(error)
            if part not in sentence or str(directory) not in sentence or "\n" in sentence:
                wrong.append(f"{case}: {error}")

    assert not wrong, "\n".join(wrong)


def test_a_file_and_a_missing_directory_are_told_apart_from_a_broken_model(tmp_path: Path) -> None:
    directory = healthy(tmp_path / "model")
    alone = tmp_path / "weights.gguf"
    alone.touch()
    (tmp_path / "model" / "adapter").mkdir()
    (tmp_path / "model" / "adapter" / "adapter_config.json").write_text("{}")

    for path, sentence in {
        directory / SINGLE: f"{directory / SINGLE} is a file; give the directory of the model,"
        f" {directory}",
        alone: f"{alone} is a GGUF file, which can't be trained; give the model's directory with"
        " its config.json and safetensors",
        tmp_path / "none": f"no such model: the directory {tmp_path / 'none'} does not exist",
        tmp_path: f"{tmp_path} holds no model: it has no config.json; a model lies in {directory}",
        directory / "adapter": f"{directory / 'adapter'} holds an adapter without the model that it"
        f" changes; the model with the adapter merged is in {directory}: give that",
    }.items():
        for call in (check_model_directory, load_for_inference):
            with pytest.raises(ModelError) as error:
                call(path)
            assert str(error.value) == sentence


def test_a_reward_model_whose_labels_have_no_values_is_refused(tmp_path: Path) -> None:
    model = load_classifier(
        FrozenModelConfig(path=saved(tiny_causal_lm("llama"), tmp_path / "base")), device=CPU
    )
    model.score = torch.nn.Linear(32, 2, bias=False)
    model.config.num_labels = 2
    path = saved(model, tmp_path / "two")

    with pytest.raises(ModelError, match="its 2 classes have no values, so that it gives no score"):
        require_score(load_classifier(FrozenModelConfig(path=path), device=CPU))


def test_numbers_too_large_for_fp16_are_said_to_be_so(tmp_path: Path) -> None:
    directory = healthy(tmp_path)
    fill(1e5)(directory)

    load_causal_lm(FrozenModelConfig(path=str(directory), precision="fp32"), device=CPU)
    with pytest.raises(ModelError, match="numbers too large for fp16: try precision bf16 or fp32"):
        load_causal_lm(FrozenModelConfig(path=str(directory), precision="fp16"), device=CPU)


def test_looking_at_a_directory_imports_nothing_heavy_and_reads_no_weights(tmp_path: Path) -> None:
    directory = healthy(tmp_path)
    size = (directory / SINGLE).stat().st_size
    os.truncate(directory / SINGLE, size + 2**36)  # 64 GiB that are nowhere
    program = (
        "import sys\n"
        "from pipeline.errors import ModelError\n"
        "from pipeline.models.directory import check_model_directory\n"
        f"try: check_model_directory({str(directory)!r})\n"
        "except ModelError as error: print(error)\n"
        "print(*{'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules))"
    )

    said = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    sentence, loaded = said.stdout.split("\n")[:2]
    assert sentence.endswith(f"it goes on after byte {size}, its tensors' end; it is damaged")
    assert loaded == ""


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("command", "spoil", "part"),
    [
        (["chat.py", "--path"], fill(float("nan")), "up_proj.weight holds NaN or infinity"),
        (
            ["-m", "inference.generate", "--prompts", "IN", "--out", "OUT", "--path"],
            write(SINGLE, POINTER),
            "is a Git-LFS pointer",
        ),
    ],
    ids=["chat", "generate"],
)
def test_commands_say_it_in_one_line_and_exit_with_2(
    command: list[str], spoil: Callable[[Path], object], part: str, tmp_path: Path
) -> None:
    directory = healthy(tmp_path / "model")
    spoil(directory)
    (tmp_path / "IN").write_text('{"prompt": "a"}\n')
    places = {"IN": str(tmp_path / "IN"), "OUT": str(tmp_path / "OUT")}

    process = subprocess.run(
        [sys.executable, *(places.get(word, word) for word in command), str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert process.returncode == 2, process.stderr
    lines = process.stderr.strip().split("\n")
    assert len(lines) <= 3
    assert lines[-1].startswith("error: ")
    assert part in lines[-1]
    assert "Traceback" not in process.stderr
