"""Adapters by name over a model that is in memory once, and those that are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from inference.serve.config import ServeConfig
from inference.serve.models import paths_to_serve
from pipeline.config import LoraConfig
from pipeline.models.export import export
from pipeline.models.load import load_causal_lm, load_tokenizer
from tests.inference.embedded_adapters import EMBEDDED, with_random_adapter
from tests.inference.serve.serving import CHAT, Running, chat, post, serving
from tests.inference.serve.test_command import refused

NAMES = ("tiny", "polite", "terse")


def step_with_lora(directory: Path, seed: int) -> PeftModel:
    """Output of a step with LoRA: the merged model and, below it, the adapter."""
    model = with_random_adapter(LoraConfig(rank=4, alpha=8), seed=seed)
    export(model, load_tokenizer(EMBEDDED), directory)
    return model.eval()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {name: tmp_path_factory.mktemp(name) for name in NAMES[1:]}
    for seed, directory in enumerate(directories.values(), start=1):
        step_with_lora(directory, seed)
    return directories


@pytest.fixture(scope="module")
def server(steps: dict[str, Path]) -> Iterator[Running]:
    config = ServeConfig(
        path=("tiny=embedded", f"merged={steps['polite']}"),
        adapter=(f"polite={steps['polite']}", f"terse={steps['terse'] / 'adapter'}"),
    )
    with serving(tuple(paths_to_serve(config))) as running:
        yield running


def answer(server: Running, model: str, text: str, **fields: Any) -> dict[str, Any]:
    fields = {"max_tokens": 12, "seed": 5, "logprobs": True, "return_token_ids": True, **fields}
    return post(server, CHAT, chat(text, **{**fields, "model": model})).json["choices"][0]


def test_an_adapter_answers_as_peft_does(server: Running, steps: dict[str, Path]) -> None:
    for name in ("polite", "terse"):
        model = load_causal_lm(EMBEDDED, device=torch.device("cpu"))
        plain = PeftModel.from_pretrained(model, str(steps[name] / "adapter")).eval()
        prompt = post(server, "/tokenize", {"messages": chat()["messages"]}).json["tokens"]

        choice = answer(server, name, chat()["messages"][0]["content"], temperature=0)

        ids = choice["token_ids"]
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1)
        assert ids == logits[:-1].argmax(-1).tolist()
        expected = [row[token].item() for row, token in zip(logprobs, ids, strict=False)]
        found = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert found == pytest.approx(expected[: len(found)], abs=1e-4)


def copied(adapter: Path, to: Path, **settings: object) -> Path:
    """An adapter of which some settings differ."""
    to.mkdir()
    own = json.loads((adapter / "adapter_config.json").read_text()) | settings
    (to / "adapter_config.json").write_text(json.dumps(own))
    save_file(load_file(adapter / "adapter_model.safetensors"), to / "adapter_model.safetensors")
    return to


def test_an_adapter_that_can_not_be_served_is_named_at_the_start(
    steps: dict[str, Path], tmp_path: Path
) -> None:
    good = steps["terse"] / "adapter"
    cut = copied(good, tmp_path / "cut")
    with (cut / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(2000)
    other_kind = copied(good, tmp_path / "kind", peft_type="IA3")
    (alone := copied(good, tmp_path / "alone") / "adapter_model.safetensors").unlink()
    wide = copied(good, tmp_path / "wide")
    tensors = load_file(good / "adapter_model.safetensors")
    first = min(name for name in tensors if ".lora_A." in name)
    save_file(tensors | {first: torch.zeros(4, 999)}, wide / "adapter_model.safetensors")
    deep = copied(good, tmp_path / "deep")
    moved = {name.replace("layers.0.", "layers.77."): each for name, each in tensors.items()}
    save_file(moved, deep / "adapter_model.safetensors")
    (tmp_path / "empty").mkdir()

    for words, sentence in (
        ((str(good),), "--adapter takes NAME=DIR, as polite=OUT/step1_sft, got /"),
        (("a=none",), "no such adapter: the directory none does not exist"),
        ((f"a={tmp_path / 'empty'}",), "holds no adapter: it has no adapter_config.json; give"),
        ((f"a={other_kind}",), "an adapter of the kind IA3, and LoRA alone is served; merge"),
        ((f"a={alone.parent}",), "holds adapter_config.json and no adapter_model.safetensors"),
        ((f"a={cut}",), "was not copied whole; copy or download it again"),
        ((f"a={wide}",), "is of another model than embedded: base_model.model.model.layers.0."),
        ((f"a={deep}",), "is of another model than embedded: that has no model.layers.77."),
        ((f"embedded={good}",), "two models are called embedded; name them"),
        ((f"a={good}", "--adapter-base", "b"), "there is no model b; there are: embedded"),
    ):
        line = refused("--path", "embedded", "--port", "0", "--adapter", *words)
        assert line.startswith("error: "), line
        assert sentence in line, line
    assert "adapter_base is given without an adapter" in refused(
        "--path", "embedded", "--adapter-base", "embedded"
    ).replace("--adapter-base", "adapter_base")
