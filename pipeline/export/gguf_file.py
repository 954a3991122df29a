"""Writing a GGUF file: settings, tokenizer, tensors, one tensor in memory at a time.

Format: ggml-org/ggml, docs/gguf.md; the `gguf` package lays out the bytes.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.config import FrozenModelConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.export.config import GgufFormat
from pipeline.export.gguf_families import Family, family_of, rope_factors
from pipeline.export.gguf_numbers import encode, format_of
from pipeline.export.gguf_vocabulary import Vocabulary, vocabulary_of
from pipeline.export.source import Source
from pipeline.files.weight_files import WeightFiles
from pipeline.models.load import load_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

ROPE_FACTORS = "rope_freqs.weight"

FILE_TYPES: Mapping[GgufFormat, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""llama.cpp's numbers of the number formats of whole files (llama_ftype in llama.h)."""

BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Ends of names of tensors that old files have and no model needs."""


@dataclass(frozen=True)
class GgufPlan:
    """All that goes into a file, before any weight is read."""

    source: Source
    family: Family
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    number_format: GgufFormat
    stop_ids: tuple[int, ...]
    weights: WeightFiles
    names: Mapping[str, str]
    """Of the tensors in the file, by those that the source has."""

    def tensor(self, stored: str) -> Tensor:
        """A tensor of the source as it is stored there, fp32."""
        return self.weights.tensor(stored).float()

    def shape(self, stored: str) -> tuple[int, ...]:
        """Its shape in the file."""
        shape = self.weights.shape(stored)
        return shape[::-1] if stored.endswith(self.family.transposed) else shape

    def format_of(self, stored: str) -> GgufFormat:
        """Its number format in the file."""
        return format_of(self.names[stored], self.shape(stored), self.number_format)


def plan_gguf(source: Source, number_format: GgufFormat) -> GgufPlan:
    """Everything that can be refused before weights are read.

    Raises:
        ModelError: the family, a setting, a tensor or the tokenizer has no GGUF form.
        ConfigError: it is not a language model.
    """
    path = str(source.directory)
    if source.is_classifier:
        raise ConfigError(
            f"--to gguf takes language models, and {path} is a reward model or another classifier;"
            " export it with --to onnx"
        )
    family = family_of(source.settings, path)
    weights = WeightFiles(source.directory)
    names = {
        stored: family.name(qualified(stored, family))
        for stored in weights.names()
        if not stored.endswith(BUFFERS) and not _is_tied(stored, source)
    }
    tokenizer = load_tokenizer(FrozenModelConfig(path=path))
    embedding = next(stored for stored, name in names.items() if name == "token_embd.weight")
    return GgufPlan(
        source=source,
        family=family,
        tokenizer=tokenizer,
        vocabulary=vocabulary_of(tokenizer, weights.shape(embedding)[0], path),
        number_format=number_format,
        stop_ids=_stop_ids(source, tokenizer),
        weights=weights,
        names=names,
    )


def qualified(stored: str, family: Family) -> str:
    """The name with the prefix that GPT-2's own files omit."""
    prefix = family.blocks.partition(".")[0] + "."
    bare = not stored.startswith((prefix, "lm_head."))
    return prefix + stored if bare else stored


def write_gguf(plan: GgufPlan, file: Path) -> None:
    """Write the file.

    Raises:
        ModelError: a weight can't be read, or not be held in the number format.
    """
    import gguf

    writer = gguf.GGUFWriter(file, plan.family.architecture)
    _add_settings(writer, plan)
    _add_tokenizer(writer, plan)
    kinds = {each: gguf.GGMLQuantizationType[each.upper()] for each in FILE_TYPES}
    for stored, name in plan.names.items():
        shape, kind = plan.shape(stored), kinds[plan.format_of(stored)]
        rows = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor_info(name, rows, np.dtype(np.uint8), math.prod(rows), kind)
    factors = rope_factors(plan.source.settings)
    if factors is not None:
        shape = tuple(factors.shape)
        writer.add_tensor_info(ROPE_FACTORS, shape, np.dtype(np.float32), 4 * len(factors))
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for data in _data(plan, factors):
            writer.write_tensor_data(data)


def _data(plan: GgufPlan, factors: Tensor | None) -> Iterator[np.ndarray]:
    settings = plan.source.settings
    for stored in plan.names:
        ours = qualified(stored, plan.family)
        laid_out = plan.family.layout(ours, plan.tensor(stored), settings)
        yield encode(laid_out, plan.format_of(stored), stored)
    if factors is not None:
        yield factors.numpy()


def _add_settings(writer: "GGUFWriter", plan: GgufPlan) -> None:
    writer.add_name(plan.source.directory.resolve().name)
    writer.add_file_type(FILE_TYPES[plan.number_format])
    writer.add_quantization_version(2)
    for key, value in plan.family.keys(plan.source.settings).items():
        full = f"{plan.family.architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        else:
            writer.add_float32(full, value)


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


def _is_tied(stored: str, source: Source) -> bool:
    """Whether it is the output matrix of a model that has the embedding there."""
    return stored == "lm_head.weight" and bool(source.settings.get("tie_word_embeddings"))


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
            f"{file} has {len(ordered)} tokens as eos_token_id, and GGUF has keys for three; leave"
            " those away that end no response"
        )
    return tuple(int(number) for number in ordered)
