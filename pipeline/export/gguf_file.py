"""Writing a GGUF file: settings, tokenizer, and tensors one at a time.

The `gguf` package has the names of tensors and settings, and lays out the bytes (ggml-org/ggml,
docs/gguf.md).
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.config import FrozenModelConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.export.config import GgufFormat
from pipeline.export.gguf_vocabulary import Vocabulary, vocabulary_of
from pipeline.export.source import Source
from pipeline.files.weight_files import WeightFiles
from pipeline.models.load import load_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

Settings = Mapping[str, Any]

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gpt2": "gpt2",
}
"""llama.cpp's architecture for a model_type."""

ROPE_FACTORS = "rope_freqs.weight"

FILE_TYPES: Mapping[GgufFormat, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""Numbers of the formats of whole files (llama_ftype in llama.h)."""

BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of the names of tensors that old files have and no model needs."""

ROTARY = tuple(f"{name}_proj.{leaf}" for name in ("q", "k") for leaf in ("weight", "bias"))
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Matrices that GPT-2 stores as (inputs, outputs)."""

BLOCK = 32
"""Elements of a q8_0 block."""

FP16_MAX = 65504.0


@dataclass(frozen=True)
class GgufPlan:
    """The content of a file, before any weight is read."""

    source: Source
    architecture: str
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    number_format: GgufFormat
    stop_ids: tuple[int, ...]
    weights: WeightFiles
    names: Mapping[str, str]
    """Names of the tensors in the file, by those that the source has."""

    def tensor(self, stored: str) -> Tensor:
        """A tensor as llama.cpp multiplies by it, fp32: (outputs, inputs), rotary pairs adjacent.

        `transformers` rotates row i of a head of d with row i + d/2, llama.cpp's architecture
        `llama` 2i with 2i + 1.
        """
        tensor, settings = self.weights.tensor(stored).float(), self.source.settings
        if self.architecture == "gpt2" and stored.endswith(TRANSPOSED):
            return tensor.t()
        if self.architecture != "llama" or not stored.endswith(ROTARY):
            return tensor
        heads = int(settings["num_attention_heads"])
        if ".k_proj." in stored:
            heads = int(settings.get("num_key_value_heads") or heads)
        return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)

    def shape(self, stored: str) -> tuple[int, ...]:
        """The tensor's shape in the file."""
        shape = self.weights.shape(stored)
        return shape[::-1] if self.architecture == "gpt2" and stored.endswith(TRANSPOSED) else shape

    def format_of(self, stored: str) -> GgufFormat:
        """The tensor's number format.

        Vectors and learned positions are f32, as llama.cpp adds them in f32. A matrix whose rows
        are no multiple of 32 has no q8_0 form and is f16.
        """
        shape = self.shape(stored)
        if len(shape) < 2 or self.names[stored].startswith("position_embd"):
            return "f32"
        is_odd = self.number_format == "q8_0" and shape[-1] % BLOCK
        return "f16" if is_odd else self.number_format


def plan_gguf(source: Source, number_format: GgufFormat) -> GgufPlan:
    """The content of a file.

    Raises:
        ModelError: the family, a setting, a tensor or the tokenizer has no GGUF form.
        ConfigError: it is not a language model.
    """
    path, settings = str(source.directory), source.settings
    if source.is_classifier:
        raise ConfigError(
            f"--to gguf takes language models, and {path} is a reward model or another classifier;"
            " export it with --to onnx"
        )
    architecture = ARCHITECTURES.get(settings["model_type"])
    if architecture is None:
        raise ModelError(
            f"{path} is of the family {settings['model_type']}, which has no GGUF form here; these"
            f" have one: {', '.join(ARCHITECTURES)}; export it with --to onnx"
        )
    refused = _gpt2_refused(settings) if architecture == "gpt2" else _llama_refused(settings)
    if refused is not None:
        raise ModelError(
            f"{path} has {refused} in its config.json, which has no GGUF form; export it with"
            " --to onnx"
        )
    weights = WeightFiles(source.directory)
    names = dict(_names(source, architecture, weights))
    tokenizer = load_tokenizer(FrozenModelConfig(path=path))
    embedding = next(stored for stored, name in names.items() if name == "token_embd.weight")
    return GgufPlan(
        source=source,
        architecture=architecture,
        tokenizer=tokenizer,
        vocabulary=vocabulary_of(tokenizer, weights.shape(embedding)[0], path),
        number_format=number_format,
        stop_ids=_stop_ids(source, tokenizer),
        weights=weights,
        names=names,
    )


def _names(source: Source, architecture: str, weights: WeightFiles) -> Iterator[tuple[str, str]]:
    """The tensors of the source, and their names in the file."""
    import gguf

    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    blocks = int(source.settings.get("num_hidden_layers") or source.settings["n_layer"])
    known = gguf.get_tensor_name_map(kind, blocks)
    is_tied = bool(source.settings.get("tie_word_embeddings", architecture == "gpt2"))
    for stored in weights.names():
        if stored.endswith(BUFFERS) or (stored == "lm_head.weight" and is_tied):
            continue
        prefix = "transformer." if architecture == "gpt2" else "model."
        full = stored if stored.startswith((prefix, "lm_head.")) else prefix + stored
        name = known.get_name(full, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ModelError(
                f"{stored} is not a tensor that GGUF has a name for in the family {architecture};"
                " export it with --to onnx or --to merged"
            )
        yield stored, name


def write_gguf(plan: GgufPlan, file: Path) -> None:
    """Write the file.

    Raises:
        ModelError: a weight can't be read, or not be held in the number format.
    """
    import gguf

    writer = gguf.GGUFWriter(file, plan.architecture)
    _add_settings(writer, plan)
    _add_tokenizer(writer, plan)
    for stored, name in plan.names.items():
        kind = gguf.GGMLQuantizationType[plan.format_of(stored).upper()]
        rows = gguf.quant_shape_to_byte_shape(plan.shape(stored), kind)
        writer.add_tensor_info(name, rows, np.dtype(np.uint8), math.prod(rows), kind)
    factors = rope_factors(plan.source.settings)
    if factors is not None:
        shape = tuple(factors.shape)
        writer.add_tensor_info(ROPE_FACTORS, shape, np.dtype(np.float32), 4 * len(factors))
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for stored in plan.names:
            writer.write_tensor_data(encode(plan.tensor(stored), plan.format_of(stored), stored))
        if factors is not None:
            writer.write_tensor_data(factors.numpy())


def encode(tensor: Tensor, number_format: GgufFormat, name: str) -> np.ndarray:
    """A tensor in a number format.

    Raises:
        ModelError: a weight is too large for f16.
    """
    import gguf

    if number_format == "f16" and tensor.numel() and float(tensor.abs().max()) > FP16_MAX:
        raise ModelError(f"{name} has a weight that f16 can't hold; take --number-format bf16")
    kind = gguf.GGMLQuantizationType[number_format.upper()]
    return gguf.quantize(tensor.contiguous().numpy(), kind)


def _add_settings(writer: "GGUFWriter", plan: GgufPlan) -> None:
    settings = plan.source.settings
    writer.add_name(plan.source.directory.resolve().name)
    writer.add_file_type(FILE_TYPES[plan.number_format])
    writer.add_quantization_version(2)
    if plan.architecture == "gpt2":
        width = int(settings["n_embd"])
        writer.add_context_length(int(settings["n_positions"]))
        writer.add_embedding_length(width)
        writer.add_block_count(int(settings["n_layer"]))
        writer.add_feed_forward_length(int(settings.get("n_inner") or 4 * width))
        writer.add_head_count(int(settings["n_head"]))
        writer.add_layer_norm_eps(float(settings["layer_norm_epsilon"]))
        return
    heads, width = int(settings["num_attention_heads"]), head_size(settings)
    kind, base, given = rope_settings(settings)
    writer.add_context_length(int(settings["max_position_embeddings"]))
    writer.add_embedding_length(int(settings["hidden_size"]))
    writer.add_block_count(int(settings["num_hidden_layers"]))
    writer.add_feed_forward_length(int(settings["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(settings.get("num_key_value_heads") or heads))
    writer.add_layer_norm_rms_eps(float(settings["rms_norm_eps"]))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(base)
    writer.add_vocab_size(int(settings["vocab_size"]))
    if kind == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(given["factor"]))


def _add_tokenizer(writer: "GGUFWriter", plan: GgufPlan) -> None:
    vocabulary, tokenizer = plan.vocabulary, plan.tokenizer
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.kinds))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    writer.add_add_space_prefix(vocabulary.add_space_prefix)
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
    ):
        if isinstance(number, int):
            add(number)
    # llama.cpp ends a response at any of the three.
    ends = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for number, add in zip(plan.stop_ids, ends, strict=False):
        add(number)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _stop_ids(source: Source, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens that end a response, the tokenizer's own first.

    Raises:
        ModelError: there are more than GGUF has keys for.
    """
    file = source.directory / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else source.settings
    given = settings.get("eos_token_id")
    stops = given if isinstance(given, list) else [] if given is None else [given]
    own = int(tokenizer.get_vocab()[str(tokenizer.eos_token)])
    ordered = sorted(dict.fromkeys(stops or [own]), key=lambda number: number != own)
    if len(ordered) > 3:
        raise ModelError(
            f"{file} has {len(ordered)} tokens as eos_token_id, and GGUF has keys for three; remove"
            " those that end no response"
        )
    return tuple(int(number) for number in ordered)


def rope_settings(settings: Settings) -> tuple[str, float, Settings]:
    """Kind of rotary embedding, its base, and its other parameters."""
    given = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    base = given.get("rope_theta", settings.get("rope_theta", 10000.0))
    return str(kind), float(base), given


def head_size(settings: Settings) -> int:
    """Width of an attention head."""
    return int(
        settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    )


def rope_factors(settings: Settings) -> Tensor | None:
    """Divisors of the rotary frequencies, (d / 2,); None for 1 of all.

    Llama 3.1's: long wavelengths by `factor`, short ones by 1, and between them interpolated
    (transformers, `_compute_llama3_parameters`).
    """
    kind, base, given = rope_settings(settings)
    if kind != "llama3":
        return None
    width = head_size(settings)
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = frequency * given["original_max_position_embeddings"] / (2 * math.pi)
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / given["factor"] + smooth)).float()


def _llama_refused(settings: Settings) -> str | None:
    """The setting that llama.cpp has no form for, if there is one."""
    kind = rope_settings(settings)[0]
    if kind not in ("default", "linear", "llama3"):
        return f"rope_type {kind}"
    if settings.get("hidden_act", "silu") != "silu":
        return f"hidden_act {settings['hidden_act']}"
    if settings.get("mlp_bias"):
        return "mlp_bias"
    is_local = settings.get("use_sliding_window", settings["model_type"] == "mistral")
    if is_local and settings.get("sliding_window") is not None:
        return f"sliding_window {settings['sliding_window']}"
    return None


def _gpt2_refused(settings: Settings) -> str | None:
    activation = settings.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        return f"activation_function {activation}"
    if settings.get("scale_attn_by_inverse_layer_idx"):
        return "scale_attn_by_inverse_layer_idx"
    return None if settings.get("scale_attn_weights", True) else "scale_attn_weights false"
