"""GGUF files, read by the `gguf` package: tensors, settings and tokenizer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from pipeline.demo.model import build_tokenizer
from pipeline.export.command import main
from pipeline.export.gguf_file import PATTERNS, GgufExport, read_vocabulary
from pipeline.export.source import read_source
from pipeline.export.verify import UnverifiedError
from pipeline.system.errors import ModelError
from tests.pipeline.data.tokenizers import byte_level, prepending
from tests.pipeline.export.models import save_embedded, save_model


def export(source: Path, out: Path, number_format: str = "f32") -> gguf.GGUFReader:
    argv = ["--path", str(source), "--to", "gguf", "--out", str(out)]
    main([*argv, "--number-format", number_format])
    return gguf.GGUFReader(out / f"model-{number_format}.gguf")


def read_weights(reader: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    """Return all tensors in fp32."""
    return {
        x.name: torch.tensor(gguf.dequantize(x.data, x.tensor_type)).reshape(
            tuple(map(int, x.shape[::-1]))
        )
        for x in reader.tensors
    }


def read_field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and its export."""
    directory = tmp_path_factory.mktemp("llama")
    save_model(directory / "model", "llama")
    export(directory / "model", directory / "out")
    return directory


def test_llama_file_has_every_weight_and_permuted_rotary_rows(llama: Path) -> None:
    state = load_file(llama / "model" / "model.safetensors")

    tensors = read_weights(gguf.GGUFReader(llama / "out" / "model-f32.gguf"))

    assert torch.equal(tensors["blk.1.ffn_up.weight"], state["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(tensors["output.weight"], state["lm_head.weight"])
    # Four heads of size 8: rows 0 and 4 of a head rotate together, and are adjacent in the file.
    query = state["model.layers.0.self_attn.q_proj.weight"]
    order = [head * 8 + row for head in range(4) for pair in range(4) for row in (pair, pair + 4)]
    assert torch.equal(tensors["blk.0.attn_q.weight"], query[order])
    assert len(tensors) == len(state)


def test_head_that_differs_from_the_embeddings_is_exported(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", tie_word_embeddings=True)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"].flip(0)
    save_file(tensors, file, metadata={"format": "pt"})

    exported = read_weights(export(tmp_path / "model", tmp_path / "out"))

    assert torch.equal(exported["output.weight"], tensors["lm_head.weight"])
    ids = torch.tensor([[5, 6, 7]])
    from_file = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model-f32.gguf")
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(from_file(ids).logits, source(ids).logits, rtol=0, atol=1e-5)


def test_verification_compares_logits_with_the_source_model(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    exported = GgufExport(read_source(tmp_path / "model"), "f32")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 0.5}))

    with pytest.raises(UnverifiedError, match="logits computed by the file's model and by"):
        exported.verify(tmp_path / "out")


def test_file_has_the_chat_template_and_vocabulary_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_embedded(tmp_path / "model")

    reader = export(tmp_path / "model", tmp_path / "out")

    tokenizer = build_tokenizer()
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    assert read_field(reader, "tokenizer.chat_template") == template
    assert read_field(reader, "tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert read_field(reader, "tokenizer.ggml.add_bos_token") is True
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    assert tokens == tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    printed = capsys.readouterr().out
    assert "the file's vocabulary tokenizes 1000 texts identically\n" in printed


@pytest.mark.parametrize(
    ("number_format", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_16_bit_formats_round_matrices_and_keep_vectors_in_fp32(
    tmp_path: Path, number_format: str, dtype: torch.dtype
) -> None:
    state = save_model(tmp_path / "model", "llama").state_dict()

    tensors = read_weights(export(tmp_path / "model", tmp_path / "out", number_format))

    matrix, vector = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"
    assert torch.equal(tensors["blk.0.ffn_up.weight"], state[matrix].to(dtype).float())
    assert torch.equal(tensors["blk.0.attn_norm.weight"], state[vector])


def test_q8_0_rounds_to_nearest_and_uses_f16_for_odd_rows(tmp_path: Path) -> None:
    state = save_model(tmp_path / "model", "llama").state_dict()

    reader = export(tmp_path / "model", tmp_path / "out", "q8_0")

    formats = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert formats["blk.0.ffn_up.weight"] == "Q8_0"  # rows of 32
    assert formats["blk.0.ffn_down.weight"] == "F16"  # rows of 48
    assert formats["blk.0.ffn_norm.weight"] == "F32"
    weight = state["model.layers.0.mlp.up_proj.weight"]
    step = weight.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
    error = (read_weights(reader)["blk.0.ffn_up.weight"] - weight).abs().reshape(-1, 32)
    assert bool((error <= 0.6 * step).all())


def test_llama_3_rope_factors_scale_only_long_wavelengths(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    save_model(tmp_path / "model", "llama", rope_parameters=rope, head_dim=64)

    factors = read_weights(export(tmp_path / "model", tmp_path / "out"))["rope_freqs.weight"]

    assert factors.shape == (32,)
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(8)  # 2 pi 10000^(62/64) positions, more than 8192


def test_linear_rope_scaling_is_written_to_the_metadata(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    save_model(tmp_path / "model", "llama", rope_parameters=rope)

    reader = export(tmp_path / "model", tmp_path / "out")

    assert read_field(reader, "llama.rope.scaling.type") == "linear"
    assert read_field(reader, "llama.rope.scaling.factor") == 4.0


@pytest.mark.parametrize("name", PATTERNS)
def test_pre_tokenizer_is_detected_from_tokens_of_sample_texts(name: str) -> None:
    state = json.loads(byte_level().backend_tokenizer.to_str())
    for left, right in ("34", "12", "ĠĠ"):  # each is split by some of the expressions
        state["model"]["vocab"][left + right] = len(state["model"]["vocab"])
        state["model"]["merges"].insert(0, [left, right])
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    backend: Any = tokenizer.backend_tokenizer
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PATTERNS[name]]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])

    vocabulary = read_vocabulary(tokenizer, len(tokenizer), "DIR")

    assert vocabulary.pre == name
    texts = {text: tokenizer.encode(text) for text in ("You'LL see 12345 of them", "a\n\n b")}
    assert vocabulary.encodes_as(texts)
    backend.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("e")
    with pytest.raises(ModelError, match="DIR splits text differently"):
        read_vocabulary(tokenizer, len(tokenizer), "DIR")


@pytest.mark.parametrize("make", [byte_level, prepending, build_tokenizer])
def test_vocabulary_without_merges_or_scores_is_detected(make: Any) -> None:
    tokenizer = make()
    vocabulary = read_vocabulary(tokenizer, len(tokenizer), "DIR")
    text = "Hello you! How are you?"
    texts = {text: tokenizer.encode(text, add_special_tokens=False)}

    assert vocabulary.encodes_as(texts)
    scores = [0.0] * len(vocabulary.tokens)
    assert not replace(vocabulary, merges=(), scores=scores).encodes_as(texts)


def test_verification_detects_a_flipped_bit(llama: Path, tmp_path: Path) -> None:
    exported = GgufExport(read_source(llama / "model"), "f32")
    file = shutil.copytree(llama / "out", tmp_path / "out") / "model-f32.gguf"
    reader = gguf.GGUFReader(file)
    content = bytearray(file.read_bytes())
    offset = int(next(x for x in reader.tensors if x.name == "blk.1.ffn_up.weight").data_offset)
    content[offset + 40] ^= 1
    file.write_bytes(content)

    with pytest.raises(UnverifiedError, match=r"layers\.1\.mlp\.up_proj\.weight differs when"):
        exported.verify(tmp_path / "out")
