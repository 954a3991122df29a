"""GGUF files as models, which every command takes: exported, then read again."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from inference.generate import main as generate
from pipeline.data.chat.resolve_format import resolve_format
from pipeline.export.command import main as export
from pipeline.models.hf.load import load_for_inference
from pipeline.system.errors import ModelError
from tests.pipeline.export.models import save_embedded, save_model
from train import main as train


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file made of the model in tmp_path / "model"."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    save_embedded(tmp_path / "model")
    export(["--path", str(tmp_path / "model"), "--to", "gguf", "--out", str(tmp_path / "out")])
    return tmp_path / "out" / "model-f32.gguf"


@torch.no_grad()
def test_a_file_has_the_outputs_tokens_and_stop_ids_of_its_model(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, tokenizer = load_for_inference(tmp_path / "model")

    model, own = load_for_inference(file)

    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
    chats = [resolve_format(each, "auto") for each in (own, tokenizer)]
    assert chats[0].template == chats[1].template
    assert chats[0].stop_ids == chats[1].stop_ids
    for text in ("What is 12 plus 7?", "Say  hello, please.", "Is 5 even?"):
        assert own.encode(text) == tokenizer.encode(text)
    assert capsys.readouterr().err.count("dequantized the GGUF weights") == 1


def test_commands_take_a_file_and_name_a_missing_one(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hi"}\n')
    prompts = ["--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]

    generate(["--path", str(file), *prompts, "--max-new-tokens", "2"])
    run = ["--step", "1", "--output-dir", str(tmp_path / "run"), "--dry-run"]
    train(["--actor-model", str(file), "--data-path", "embedded", *run])

    assert (tmp_path / "out.jsonl").is_file()
    (directory,) = (tmp_path / "cache" / "gguf").iterdir()
    assert str(directory) in capsys.readouterr().out
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    save_model(tmp_path / "long", "llama", rope_parameters=rope)
    export(["--path", str(tmp_path / "long"), "--to", "gguf", "--out", str(tmp_path / "scaled")])
    with pytest.raises(ModelError, match="has RoPE scaling"):
        load_for_inference(tmp_path / "scaled" / "model-f32.gguf")
    with pytest.raises(ModelError, match=r"no such model: the file .*none\.gguf does not exist"):
        load_for_inference(tmp_path / "none.gguf")
