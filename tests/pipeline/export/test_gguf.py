"""GGUF files, read by the `gguf` package: tensors, settings, tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pipeline.demo.model import build_tokenizer
from pipeline.errors import ModelError
from pipeline.export.command import main
from pipeline.export.gguf_file import plan_gguf, rope_factors
from pipeline.export.gguf_verify import compare_tokens, verify_gguf, vocabulary_in
from pipeline.export.gguf_vocabulary import (
    EXPRESSIONS,
    Vocabulary,
    pre_tokenizer_name,
    tokenizer_of,
)
from pipeline.export.source import UnverifiedError, read_source
from tests.pipeline.data.tokenizers import byte_level, prepending
from tests.pipeline.export.models import save_embedded, save_model


def export(source: Path, out: Path, number_format: str = "f32", texts: int = 60) -> gguf.GGUFReader:
    words = ["--path", str(source), "--to", "gguf", "--out", str(out), "--texts", str(texts)]
    main([*words, "--number-format", number_format])
    return gguf.GGUFReader(out / f"model-{number_format}.gguf")


def weights(reader: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    """All tensors, fp32."""
    return {
        each.name: torch.tensor(gguf.dequantize(each.data, each.tensor_type)).reshape(
            tuple(map(int, each.shape[::-1]))
        )
        for each in reader.tensors
    }


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


def test_a_llama_has_each_weight_and_rotary_rows_side_by_side(tmp_path: Path) -> None:
    state = save_model(tmp_path / "model", "llama").state_dict()

    found = weights(export(tmp_path / "model", tmp_path / "out"))

    assert torch.equal(found["blk.1.ffn_up.weight"], state["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(found["output.weight"], state["lm_head.weight"])
    # Four heads of 8: rows 0 and 4 of a head rotate together, and lie side by side in the file.
    query = state["model.layers.0.self_attn.q_proj.weight"]
    order = [head * 8 + row for head in range(4) for pair in range(4) for row in (pair, pair + 4)]
    assert torch.equal(found["blk.0.attn_q.weight"], query[order])
    assert len(found) == len(state)


def test_a_gpt2_has_its_matrices_turned_and_its_output_tied(tmp_path: Path) -> None:
    state = save_model(tmp_path / "model", "gpt2").state_dict()

    found = weights(export(tmp_path / "model", tmp_path / "out"))

    ours = state["transformer.h.1.mlp.c_fc.weight"]
    assert ours.shape == (32, 128)
    assert torch.equal(found["blk.1.ffn_up.weight"], ours.t())
    assert torch.equal(found["position_embd.weight"], state["transformer.wpe.weight"])
    assert "output.weight" not in found


def test_the_embedded_model_has_its_template_stop_ids_and_tokens(tmp_path: Path) -> None:
    save_embedded(tmp_path / "model")

    reader = export(tmp_path / "model", tmp_path / "out", texts=300)

    tokenizer = build_tokenizer()
    template = (tmp_path / "model" / "chat_template.jinja").read_text()
    assert value(reader, "tokenizer.chat_template") == template
    assert value(reader, "tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert value(reader, "tokenizer.ggml.add_bos_token") is True
    tokens = value(reader, "tokenizer.ggml.tokens")
    assert tokens == tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- 300 texts have equal tokens by the vocabulary of the file\n" in card


@pytest.mark.parametrize(
    ("number_format", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_halves_are_the_rounded_weights_and_vectors_stay_whole(
    tmp_path: Path, number_format: str, dtype: torch.dtype
) -> None:
    state = save_model(tmp_path / "model", "llama").state_dict()

    found = weights(export(tmp_path / "model", tmp_path / "out", number_format, texts=3))

    matrix, vector = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"
    assert torch.equal(found["blk.0.ffn_up.weight"], state[matrix].to(dtype).float())
    assert torch.equal(found["blk.0.attn_norm.weight"], state[vector])


def test_q8_0_has_the_nearest_steps_of_each_block_and_f16_for_odd_rows(tmp_path: Path) -> None:
    state = save_model(tmp_path / "model", "llama").state_dict()

    reader = export(tmp_path / "model", tmp_path / "out", "q8_0", texts=3)

    formats = {each.name: each.tensor_type.name for each in reader.tensors}
    assert formats["blk.0.ffn_up.weight"] == "Q8_0"  # rows of 32
    assert formats["blk.0.ffn_down.weight"] == "F16"  # rows of 48
    assert formats["blk.0.ffn_norm.weight"] == "F32"
    ours = state["model.layers.0.mlp.up_proj.weight"]
    step = ours.reshape(-1, 32).abs().amax(1, keepdim=True) / 127
    error = (weights(reader)["blk.0.ffn_up.weight"] - ours).abs().reshape(-1, 32)
    assert bool((error <= 0.6 * step).all())


def test_llama_3_divides_long_wavelengths_alone() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    settings = {"hidden_size": 64, "num_attention_heads": 1, "rope_parameters": rope}

    factors = rope_factors(settings)

    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**settings, max_position_embeddings=65536)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    assert factors is not None
    torch.testing.assert_close(plain / factors, theirs)
    assert factors[0] == 1
    assert factors[-1] == 8


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_pre_tokenizer_is_known_by_its_expression(name: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": EXPRESSIONS[name]}, "behavior": "Isolated"}
    by_bytes = {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False}
    parts = [split | {"invert": False}, by_bytes]
    given = {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "model": {"ignore_merges": name == "llama-bpe"},
    }

    assert pre_tokenizer_name(given, "DIR") == name
    parts[0]["pattern"] = {"Regex": r"\w+"}
    with pytest.raises(ModelError, match=r"DIR splits text in a way .* no name for here \(\\w\+"):
        pre_tokenizer_name(given, "DIR")


@pytest.mark.parametrize("make", [byte_level, prepending, build_tokenizer])
def test_the_files_vocabulary_finds_other_tokens_once_it_is_changed(
    tmp_path: Path, make: Any
) -> None:
    tokenizer = make()
    save_model(tmp_path / "model", "llama", tokenizer=tokenizer)
    vocabulary = vocabulary_in(export(tmp_path / "model", tmp_path / "out"))
    text = "Hello you! How are you?"
    ids = [tokenizer.encode(text, add_special_tokens=False)]
    compare_tokens([text], ids, lambda text: tokens_by(vocabulary, text), by="the file")

    other = replace(
        vocabulary,
        merges=(),
        scores=[0.0] * len(vocabulary.tokens),
        add_space_prefix=not vocabulary.add_space_prefix,
    )
    with pytest.raises(UnverifiedError, match=r"tokens by the tokenizer and .* by the file"):
        compare_tokens([text], ids, lambda text: tokens_by(other, text), by="the file")


def tokens_by(vocabulary: Vocabulary, text: str) -> list[int]:
    return tokenizer_of(vocabulary).encode(text, add_special_tokens=False).ids


def test_a_flipped_bit_of_a_weight_is_found(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama")
    reader = export(tmp_path / "model", tmp_path / "out", texts=3)
    plan = plan_gguf(read_source(tmp_path / "model"), "f32")
    file = tmp_path / "out" / "model-f32.gguf"
    whole = bytearray(file.read_bytes())
    place = int(next(e for e in reader.tensors if e.name == "blk.1.ffn_up.weight").data_offset)
    whole[place + 40] ^= 1
    file.write_bytes(whole)

    with pytest.raises(UnverifiedError, match=r"layers\.1\.mlp\.up_proj\.weight was not read back"):
        verify_gguf(plan, file, texts=3)
