"""GGUF files for llama.cpp: settings, tokenizer, and tensors one at a time.

The `gguf` package provides the names of tensors and settings and writes the bytes (ggml-org/ggml,
docs/gguf.md); `transformers` reads the file back.
"""

import json
import math
import random
import re
import unicodedata
from contextlib import closing
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.config import FrozenModelConfig
from pipeline.data.chat.encoders import end_ids
from pipeline.demo.task import corpus
from pipeline.export.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    PATTERNS,
    ROPE_FACTORS,
    STOPS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    read_tokenizer,
)
from pipeline.export.source import Source
from pipeline.export.verify import ROUNDED, TOLERANCE, UnverifiedError, compare_outputs, logits_fn
from pipeline.files.safetensors_header import stored_tensors
from pipeline.files.tensor_io import DTYPES as UNQUANTIZED
from pipeline.models.hf.load import load_tokenizer
from pipeline.system.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""llama.cpp's architecture for each supported `model_type`."""

REQUIRED_SETTINGS = {"hidden_act": "silu", "mlp_bias": False, "sliding_window": None}
"""Values of settings that llama.cpp requires."""

INTEGER_SETTINGS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""Integer settings of a file by name, with the corresponding settings of a model."""

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""Numbers of the file formats (llama_ftype in llama.h)."""

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}

BLOCK = 32
"""Elements per q8_0 block."""

FP16_MAX = 65504.0

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

ALPHABETS = ("abcdefghijkl", "ABCDEFGHIJKL", "0123456789", " .,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+`~")
ALPHABETS += (
    "àâäçéèêëîïôöùûüßñåøæœ",
    "абвгдежзийкл",
    "的一是不了人我在有他",
    "あいうえおカキク",
    "😀🎉🚀👍",
)
NUM_TEXTS = 1000
"""Number of texts whose tokens are compared."""

SEPARATORS = (" ", " ", " ", "  ", "    ", "\n", "\n\n", "\t", ", ", "")


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, rows: int, path: str) -> Vocabulary:
    """Read the vocabulary of a tokenizer; embedding rows without a token are marked unused.

    Raises:
        ModelError: the tokenizer is not BPE, has more tokens than `rows`, or llama.cpp would
            tokenize one of `NUM_TEXTS` texts differently.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    model = definition.get("model", {})
    if model.get("type") != "BPE":
        raise ModelError(
            f"GGUF export needs a BPE tokenizer with a tokenizer.json, which {path} does not have"
        )
    token_ids: dict[str, int] = tokenizer.get_vocab()
    if max(token_ids.values(), default=0) >= rows:
        raise ModelError(
            f"the tokenizer of {path} has {max(token_ids.values()) + 1} tokens, but the model's"
            f" embedding has {rows} rows; use the model's own tokenizer"
        )
    has_scores = bool(model.get("byte_fallback"))
    tokens, token_types = [f"[PAD{token_id}]" for token_id in range(rows)], [UNUSED] * rows
    for token, token_id in token_ids.items():
        tokens[token_id] = token
        token_types[token_id] = BYTE if has_scores and BYTE_TOKEN.fullmatch(token) else NORMAL
    for added in definition["added_tokens"]:
        token_types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if tokenizer.unk_token_id is not None and has_scores:
        token_types[token_ids[str(tokenizer.unk_token)]] = UNKNOWN
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    merge_ranks: dict[str, int] = {}  # rank of the first merge that makes a token
    for merge in merges:
        merge_ranks.setdefault(merge.replace(" ", "", 1), len(merge_ranks) + 1)
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    adds_bos = len(full) > len(plain) and full[0] == tokenizer.bos_token_id
    adds_eos = len(full) > len(plain) + adds_bos and full[-1] == tokenizer.eos_token_id
    samples = make_texts(tokenizer)
    expected = {text: tokenizer.encode(text, add_special_tokens=False) for text in samples}
    candidates = [(name, False) for name in PATTERNS]
    candidates = [("default", True), ("default", False)] if has_scores else candidates
    for pre, adds_prefix in candidates:
        vocabulary = Vocabulary(
            model="llama" if has_scores else "gpt2",
            pre=pre,
            tokens=tokens,
            token_type=token_types,
            scores=[-float(merge_ranks.get(token, 0)) for token in tokens] if has_scores else [],
            merges=[] if has_scores else merges,
            add_bos_token=adds_bos,
            add_eos_token=adds_eos,
            add_space_prefix=adds_prefix,
        )
        if vocabulary.encodes_as(expected):
            return vocabulary
    raise ModelError(
        f"the tokenizer of {path} splits text differently from llama.cpp's pre-tokenizers"
        f" ({', '.join(pre for pre, _ in candidates)}); use --to onnx"
    )


def make_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Make `NUM_TEXTS` texts, always the same: sentences, words in many scripts, random tokens.

    They are in Unicode NFC, since llama.cpp does not normalize text.
    """
    rng = random.Random(0)
    ids = sorted(tokenizer.get_vocab().values())
    special = [str(token) for token in tokenizer.all_special_tokens] or [""]
    sentences = list(islice(corpus(), 1000))
    texts: list[str] = []
    for number in range(NUM_TEXTS):
        if number % 3 == 0:
            text = rng.choice(SEPARATORS).join(rng.choices(sentences, k=rng.randint(1, 3)))
        elif number % 3 == 1:
            letters = (rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 9)) for _ in range(8))
            text = "".join("".join(word) + rng.choice(SEPARATORS) for word in letters)
            text += rng.choice(special) + text
        else:
            text = str(tokenizer.decode(rng.choices(ids, k=20), skip_special_tokens=True))
        texts.append(unicodedata.normalize("NFC", text.replace("\ufffd", "")))
    return texts


class GgufExport:
    """The export of a language model as a GGUF file with matrices in a given data type.

    Raises:
        ModelError: the family, a setting, a tensor or the tokenizer has no GGUF form.
        ConfigError: the model is not a language model.
    """

    def __init__(self, source: Source, number_format: str) -> None:
        path = str(source.directory)
        if source.is_classifier:
            raise ConfigError(
                f"--to gguf needs a language model, but {path} is a classifier; export it with --to"
                " onnx"
            )
        config = self.config = AutoConfig.from_pretrained(path)
        if config.model_type not in ARCHITECTURES:
            raise ModelError(
                f"{path} is of the family {config.model_type}, which GGUF export does not support"
                f" (it supports {', '.join(ARCHITECTURES)}); export it with --to onnx"
            )
        self.rope = config.rope_parameters
        required = REQUIRED_SETTINGS.items()
        unsupported = [name for name, value in required if getattr(config, name, value) != value]
        if self.rope["rope_type"] not in ("default", "linear", "llama3"):
            unsupported.append("rope_parameters")
        if unsupported:
            raise ModelError(
                f"GGUF export does not support the value of {unsupported[0]} in the config.json of"
                f" {path}; export it with --to onnx"
            )
        self.source, self.number_format = source.directory, number_format
        self.architecture = ARCHITECTURES[config.model_type]
        self.stored = stored_tensors(Path(path))
        quantized = [
            name for name, tensor in self.stored.items() if tensor.dtype not in UNQUANTIZED
        ]
        if quantized:
            raise ModelError(
                f"{path} stores {quantized[0]} as {self.stored[quantized[0]].dtype}; GGUF export"
                " needs unquantized weights"
            )
        self.names = self._map_names()
        self.tokenizer = load_tokenizer(FrozenModelConfig(path=path))
        rows = self.stored["model.embed_tokens.weight"].shape[0]
        self.vocabulary = read_vocabulary(self.tokenizer, rows, path)
        self.stop_ids = end_ids(self.tokenizer)
        if len(self.stop_ids) > 3:
            raise ModelError(
                f"the generation_config.json of {path} has {len(self.stop_ids)} end-of-response"
                " tokens, but GGUF has keys for only three; remove unused ones"
            )
        self.file = f"model-{number_format}.gguf"
        self.title = f"GGUF of a {source.kind}, {number_format}"

    def _map_names(self) -> dict[str, str]:
        """Map the names of the source's tensors to their names in the file."""
        import gguf

        names_by_id = gguf.MODEL_ARCH_NAMES.items()
        architecture = next(id_ for id_, name in names_by_id if name == self.architecture)
        name_map = gguf.get_tensor_name_map(architecture, self.config.num_hidden_layers)
        names: dict[str, str] = {}
        for stored in self.stored:
            if (stored == "lm_head.weight" and self._is_tied()) or stored.endswith(
                ".rotary_emb.inv_freq"
            ):
                continue
            name = name_map.get_name(stored, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ModelError(f"{stored} of {self.source} has no GGUF name; use --to onnx")
            names[stored] = name
        return names

    def _is_tied(self) -> bool:
        """Return whether the output layer is the embedding; `transformers` unties unequal ones."""
        if not self.config.tie_word_embeddings:
            return False
        return torch.equal(self.read("lm_head.weight"), self.read("model.embed_tokens.weight"))

    def read(self, stored: str) -> Tensor:
        """Read a tensor of the source."""
        with safe_open(self.stored[stored].file, "pt") as file:
            return file.get_tensor(stored)

    def choose_format(self, stored: str) -> str:
        """Return the data type of an exported tensor.

        Vectors are f32, since llama.cpp adds them in f32. A matrix whose row length is not a
        multiple of 32 can't be q8_0 and is f16.
        """
        shape = self.stored[stored].shape
        if len(shape) < 2:
            return "f32"
        is_unaligned = self.number_format == "q8_0" and shape[-1] % BLOCK
        return "f16" if is_unaligned else self.number_format

    def encode(self, stored: str) -> np.ndarray:
        """Encode a tensor in its data type, in llama.cpp's layout.

        Within a head of size d, `transformers` rotates row i with row i + d/2, whereas llama.cpp's
        `llama` architecture rotates row 2i with row 2i + 1.
        """
        import gguf

        tensor, number_format = self.read(stored).float(), self.choose_format(stored)
        if number_format == "f16" and tensor.numel() and float(tensor.abs().max()) > FP16_MAX:
            raise ModelError(f"{stored} has a weight beyond the range of f16; use f32 or bf16")
        if self.architecture == "llama" and re.search(r"\.[qk]_proj\.", stored):
            config = self.config
            heads = config.num_key_value_heads if ".k_" in stored else config.num_attention_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = gguf.GGMLQuantizationType[number_format.upper()]
        return gguf.quantize(tensor.contiguous().numpy(), kind)

    def rope_factors(self) -> Tensor | None:
        """Return the divisors of Llama 3.1's rotary frequencies, (d / 2,), or None if all are 1."""
        if self.rope["rope_type"] != "llama3":
            return None
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](self.config, torch.device("cpu"))
        width = 2 * len(scaled)
        return self.rope["rope_theta"] ** (-torch.arange(0, width, 2) / width) / scaled

    def write(self, directory: Path) -> None:
        """Write the file, one tensor in memory at a time.

        Raises:
            ModelError: a weight can't be read or represented in the data type.
        """
        import gguf

        writer = gguf.GGUFWriter(directory / self.file, self.architecture)
        self._add_settings(writer)
        self._add_tokenizer(writer)
        for stored, name in self.names.items():
            kind = gguf.GGMLQuantizationType[self.choose_format(stored).upper()]
            shape = gguf.quant_shape_to_byte_shape(self.stored[stored].shape, kind)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kind)
        factors = self.rope_factors()
        if factors is not None:
            shape, size = tuple(factors.shape), factors.nbytes
            writer.add_tensor_info(ROPE_FACTORS, shape, np.dtype(np.float32), size)
        with closing(writer):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for stored in self.names:
                writer.write_tensor_data(self.encode(stored))
            if factors is not None:
                writer.write_tensor_data(factors.numpy())

    def _add_settings(self, writer: "GGUFWriter") -> None:
        import gguf

        config = self.config
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        writer.add_name(self.source.resolve().name)
        writer.add_file_type(FILE_TYPES[self.number_format])
        writer.add_quantization_version(2)
        for name, setting in INTEGER_SETTINGS.items():
            getattr(writer, f"add_{name}")(int(getattr(config, setting)))
        writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
        for add in (
            writer.add_key_length,
            writer.add_value_length,
            writer.add_rope_dimension_count,
        ):
            add(width)
        writer.add_rope_freq_base(float(self.rope["rope_theta"]))
        if self.rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(self.rope["factor"]))

    def _add_tokenizer(self, writer: "GGUFWriter") -> None:
        from gguf import GGUFValueType

        for item in fields(Vocabulary):
            value = getattr(self.vocabulary, item.name)
            if value != []:
                kind = GGUFValueType.get_type(value)
                writer.add_key_value(f"tokenizer.ggml.{item.name}", value, kind)
        tokenizer = self.tokenizer
        for kind in ("bos", "unk", "pad"):
            token_id = getattr(tokenizer, f"{kind}_token_id")
            if isinstance(token_id, int):
                getattr(writer, f"add_{kind}_token_id")(token_id)
        # llama.cpp stops at any of these three.
        for kind, token_id in zip(STOPS, self.stop_ids, strict=False):
            getattr(writer, f"add_{kind}_token_id")(token_id)
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)

    def verify(self, directory: Path) -> list[str]:
        """Compare the file's tokenizer, tensors and outputs with those of the source.

        Raises:
            UnverifiedError: the tokenizer, a tensor or an output differs.
        """
        return [self._compare_tokenizer(directory), *self._compare_model(directory)]

    def _compare_tokenizer(self, directory: Path) -> str:
        from gguf import GGUFReader

        exported, stops = read_tokenizer(GGUFReader(directory / self.file))
        tokenizer, texts = self.tokenizer, make_texts(self.tokenizer)
        template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
        if (exported.chat_template, stops) != (template, self.stop_ids) or any(
            exported.encode(text) != tokenizer.encode(text) for text in texts
        ):
            raise UnverifiedError("not exported: the tokenizer differs when read back")
        return (
            "tokenizer, chat template and stop ids match when read back; the file's vocabulary"
            f" tokenizes {NUM_TEXTS} texts identically"
        )

    def _compare_model(self, directory: Path) -> list[str]:
        settings = AutoConfig.from_pretrained(directory, gguf_file=self.file)
        settings.rope_parameters = self.rope  # transformers does not read the scaling
        exported = AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=self.file, config=settings, dtype=torch.float32
        )
        state, is_rounded = exported.eval().state_dict(), False
        for stored in self.names:
            tensor = self.read(stored).float()
            is_rounded |= not torch.equal(state[stored], tensor)
            if not matches_stored(state[stored], tensor, self.choose_format(stored)):
                raise UnverifiedError(f"not exported: {stored} differs when read back")
        model = AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32).eval()
        formats = ", ".join(dict.fromkeys(map(self.choose_format, self.names)))
        return [
            f"{len(self.names)} tensors in {formats} match when read back by transformers",
            *compare_outputs(
                model,
                logits_fn(model),
                logits_fn(exported),
                program="the file's model",
                tolerance=ROUNDED if is_rounded else TOLERANCE,
            ),
        ]


def matches_stored(exported: Tensor, tensor: Tensor, number_format: str) -> bool:
    """Return whether `exported` equals `tensor` stored in a data type.

    In q8_0 no weight may differ by more than half its block's scale (the largest magnitude divided
    by 127), plus the rounding of the scale to fp16.
    """
    if number_format != "q8_0":
        return torch.equal(exported, tensor.to(DTYPES[number_format]).float())
    error = (exported - tensor).abs().reshape(-1, BLOCK)
    scale = tensor.reshape(-1, BLOCK).abs().amax(1, keepdim=True) / 127
    return bool((error <= 0.5001 * scale + 127 * (2.0**-11 * scale + 2.0**-25)).all())
