"""ONNX files, run by onnxruntime on new texts, compared with transformers and our Scorer."""

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

from inference.reward_model import load_scorer, score_responses
from pipeline.data.examples import Message
from pipeline.export.command import main
from pipeline.export.onnx_file import OnnxExport
from pipeline.export.source import read_source
from pipeline.export.verify import UnverifiedError
from tests.pipeline.export.models import save_embedded, save_model


def export(source: Path, out: Path) -> onnxruntime.InferenceSession:
    main(["--path", str(source), "--to", "onnx", "--out", str(out)])
    return onnxruntime.InferenceSession(out / "model.onnx")


def run(session: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return all outputs for a batch that is right-padded with id 0."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy()}
    return [torch.from_numpy(output) for output in session.run(None, inputs)]


@pytest.mark.grid
def test_actor_logits_match_transformers_in_a_padded_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_embedded(tmp_path / "model").eval()

    session = export(tmp_path / "model", tmp_path / "out")

    rows = [[1, 50, 60], [1, 300, 301, 302, 303, 304, 305], [7]]
    (logits,) = run(session, rows)
    for row, row_logits in zip(rows, logits, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0]
        torch.testing.assert_close(row_logits[: len(row)], expected, rtol=0, atol=1e-5)
    printed = capsys.readouterr().out
    assert "logits computed by onnxruntime are within 1e-05 of the model's on 8 padded" in printed
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    assert [x.name for x in session.get_inputs()] == ["input_ids", "attention_mask"]


@pytest.mark.grid
def test_reward_is_read_at_the_last_token_even_if_it_is_padding(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2", labels=1)

    session = export(tmp_path / "model", tmp_path / "out")

    _, chat = load_scorer(str(tmp_path / "model"))
    prompt = (Message("user", "How are you?"),)
    responses = ["Fine, so.", "Hello!", "Hello you! How are you? Fine, so."]
    rows = [chat.encode(prompt, (Message("assistant", text),)).input_ids for text in responses]
    assert rows[0][-1] == chat.tokenizer.pad_token_id
    _, scores = run(session, [list(row) for row in rows])
    expected = score_responses(str(tmp_path / "model"), [(prompt, text) for text in responses])
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=0, atol=1e-5)

    file = tmp_path / "out" / "model.onnx"
    stored = onnx.load(file)
    weight = next(x for x in stored.graph.initializer if len(x.dims) == 2)
    changed = onnx.numpy_helper.to_array(weight) + 1e-2
    weight.CopyFrom(onnx.numpy_helper.from_array(changed, weight.name))
    onnx.save(stored, file)
    with pytest.raises(UnverifiedError, match="by onnxruntime and by the model differ by"):
        OnnxExport(read_source(tmp_path / "model")).verify(tmp_path / "out")


@pytest.mark.grid
def test_classifier_outputs_logits_and_expected_class_value(tmp_path: Path) -> None:
    values = [0.0, 1.0, 3.0]
    model = save_model(tmp_path / "model", "llama", labels=3, class_values=values).eval()

    session = export(tmp_path / "model", tmp_path / "out")

    row = [5, 6, 7, 8]
    logits, score = run(session, [row, [9]])
    with torch.no_grad():
        expected_logits = model(torch.tensor([row])).logits[0]
    torch.testing.assert_close(logits[0], expected_logits, rtol=0, atol=1e-5)
    expected = (expected_logits.softmax(0) * torch.tensor(values)).sum()
    torch.testing.assert_close(score[0], expected, rtol=0, atol=1e-5)
