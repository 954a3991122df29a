"""Verification of a GGUF file, read back by the `gguf` package and, if installed, by llama.cpp."""

import importlib
import importlib.util
import random
import unicodedata
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.config import FrozenModelConfig
from pipeline.demo.task import corpus
from pipeline.export.gguf_file import BLOCK, ROPE_FACTORS, GgufPlan
from pipeline.export.gguf_vocabulary import Vocabulary, tokenizer_of
from pipeline.export.greedy import equal_before_a_tie, greedy_with_margins
from pipeline.export.source import UnverifiedError
from pipeline.models.forward import context_length
from pipeline.models.load import load_causal_lm

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 16, 64
F32 = 0
"""ggml's number of the format, for the cache of keys and values."""

TIE = 2e-3
"""Margin of two logits, in units of the largest, that llama.cpp's rounding may decide: with GPT-2's
GELU its logits differ from torch's by 1e-3 in f32 (6e-4 of the largest), with SwiGLU by 2e-6."""

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "0123456789",
    " .,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+`~",
    "àâäçéèêëîïôöùûüßñåøæœ",
    "абвгдежзийклмнопрстуфхцчшщъыьэюя",
    "的一是不了人我在有他这中大来上国",
    "あいうえおかきくけこアイウエオ",
    "😀😂🎉🚀👍",
)
GAPS = (" ", " ", " ", "  ", "    ", "\n", "\n\n", "\t", ", ", "")


def has_llama_cpp() -> bool:
    """Whether llama.cpp's Python package is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


def verify_gguf(plan: GgufPlan, file: Path, *, texts: int) -> list[str]:
    """Sentences on what was verified.

    Raises:
        UnverifiedError: a tensor, a setting or the tokens of a text differ.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    verified = [_compare_tensors(plan, reader), _compare_stops(plan, reader)]
    samples = make_texts(plan.tokenizer, texts)
    expected = [plan.tokenizer.encode(text, add_special_tokens=False) for text in samples]
    backend = tokenizer_of(vocabulary_in(reader))

    def encode(text: str) -> list[int]:
        return backend.encode(text, add_special_tokens=False).ids

    compare_tokens(samples, expected, encode, by="the file's vocabulary")
    verified.append(f"{len(samples)} texts have equal tokens by the vocabulary of the file")
    return verified + (_by_llama_cpp(plan, file, samples, expected) if has_llama_cpp() else [])


def vocabulary_in(reader: "GGUFReader") -> Vocabulary:
    """The vocabulary that a file has."""
    return Vocabulary(
        model=_value(reader, "model"),
        pre=_value(reader, "pre"),
        tokens=_value(reader, "tokens"),
        kinds=_value(reader, "token_type"),
        scores=_value(reader, "scores") or (),
        merges=_value(reader, "merges") or (),
        add_bos=_value(reader, "add_bos_token"),
        add_eos=_value(reader, "add_eos_token"),
        add_space_prefix=_value(reader, "add_space_prefix"),
    )


def _value(reader: "GGUFReader", key: str) -> Any:  # noqa: ANN401  # of any type
    field = reader.get_field(
        f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}"
    )
    return None if field is None else field.contents()


def _compare_tensors(plan: GgufPlan, reader: "GGUFReader") -> str:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    extra = tensors.keys() - set(plan.names.values()) - {ROPE_FACTORS}
    if extra or len(set(plan.names.values())) != len(plan.names):
        raise UnverifiedError(f"not exported: the file has unknown tensors {sorted(extra)}")
    for stored, name in plan.names.items():
        if name not in tensors or not is_read_back(
            tensors[name], plan.tensor(stored), plan.format_of(stored)
        ):
            raise UnverifiedError(f"not exported: {stored} was not read back as it was written")
    formats = [plan.format_of(stored) for stored in plan.names]
    counts = ", ".join(f"{formats.count(each)} in {each}" for each in dict.fromkeys(formats))
    how = "within half a step of their scales" if "q8_0" in formats else "equal"
    return f"{len(plan.names)} tensors read back {how}: {counts}"


def is_read_back(read: "ReaderTensor", tensor: Tensor, number_format: str) -> bool:
    """Whether a tensor of a file is `tensor` in its number format.

    In q8_0 no weight may differ by more than half a step of its block's scale, the largest
    magnitude divided by 127, and the rounding of the scale to fp16.
    """
    import gguf

    if read.tensor_type.name.lower() != number_format:
        return False
    if tuple(map(int, read.shape[::-1])) != tuple(tensor.shape):
        return False
    values = torch.tensor(gguf.dequantize(read.data, read.tensor_type)).reshape(tensor.shape)
    if number_format != "q8_0":
        dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        return torch.equal(values, tensor.to(dtypes[number_format]).float())
    error = (values - tensor).abs().reshape(-1, BLOCK)
    scale = tensor.reshape(-1, BLOCK).abs().amax(1, keepdim=True) / 127
    return bool((error <= 0.5001 * scale + 127 * (2.0**-11 * scale + 2.0**-25)).all())


def _compare_stops(plan: GgufPlan, reader: "GGUFReader") -> str:
    ends = [_value(reader, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    written, template = plan.tokenizer.chat_template, _value(reader, "chat_template")
    same_template = template == (written if isinstance(written, str) else None)
    if [each for each in ends if each is not None] != list(plan.stop_ids) or not same_template:
        raise UnverifiedError("not exported: chat template or stop ids were not read back")
    what = "chat template and stop ids" if template is not None else "stop ids (no chat template)"
    return f"{what} read back equal"


def make_texts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """`count` texts, the same on every call: sentences, words of many alphabets, random tokens.

    They are in Unicode's composed form (NFC), into which some tokenizers bring a text first and
    llama.cpp never does.
    """
    draw = random.Random(0)
    ids = sorted(tokenizer.get_vocab().values())
    special = [str(token) for token in tokenizer.all_special_tokens] or [""]
    sentences = list(islice(corpus(), 1000))

    def words() -> str:
        letters = (draw.choices(draw.choice(ALPHABETS), k=draw.randint(1, 9)) for _ in range(8))
        return "".join("".join(word) + draw.choice(GAPS) for word in letters)

    makers: list[Callable[[], str]] = [
        lambda: draw.choice(GAPS).join(draw.choices(sentences, k=draw.randint(1, 3))),
        lambda: words() + draw.choice(special) + words(),
        lambda: str(tokenizer.decode(draw.choices(ids, k=20), skip_special_tokens=True)),
    ]
    texts = [makers[number % 3]().replace("\ufffd", "") for number in range(count)]
    return [unicodedata.normalize("NFC", text) for text in texts]


def compare_tokens(
    texts: Sequence[str],
    expected: Sequence[Sequence[int]],
    encode: Callable[[str], list[int]],
    *,
    by: str,
) -> None:
    """Raise UnverifiedError at the first text whose tokens differ."""
    for text, ids in zip(texts, expected, strict=True):
        tokens = encode(text)
        if tokens != list(ids):
            raise UnverifiedError(
                f"not exported: {text[:60]!r} has {len(ids)} tokens by the tokenizer and"
                f" {len(tokens)}, other ones, by {by}; export it with --to onnx"
            )


def _by_llama_cpp(
    plan: GgufPlan, file: Path, texts: Sequence[str], expected: Sequence[Sequence[int]]
) -> list[str]:
    """Compare llama.cpp's tokens of the texts and, of an f32 file, its greedy responses."""
    llama: Any = importlib.import_module("llama_cpp")  # an optional package without types
    try:
        model = llama.Llama(
            str(file),
            n_ctx=PROMPT_TOKENS + NEW_TOKENS,
            n_threads=1,
            type_k=F32,
            type_v=F32,
            verbose=False,
            seed=0,
        )
    except ValueError as error:
        raise UnverifiedError(f"not exported: llama.cpp can't load the file ({error})") from None

    def encode(text: str) -> list[int]:
        return model.tokenize(text.encode(), add_bos=False, special=True)

    compare_tokens(texts, expected, encode, by="llama.cpp")
    verified = [f"{len(texts)} texts have equal tokens by llama.cpp"]
    if plan.number_format == "f32":
        prompts = [list(ids[:PROMPT_TOKENS]) for ids in expected if len(ids) >= PROMPT_TOKENS]
        count = _compare_greedy(plan, model, prompts[:PROMPTS])
        verified.append(f"{count} greedy tokens are equal by llama.cpp, up to ties of two logits")
    model.close()
    return verified


def _compare_greedy(plan: GgufPlan, llama: Any, prompts: Sequence[list[int]]) -> int:  # noqa: ANN401
    """The number of equal greedy tokens, of each response those before a tie."""
    config = FrozenModelConfig(path=str(plan.source.directory), precision="fp32")
    reference = load_causal_lm(config, device=torch.device("cpu"))
    reference.set_attn_implementation("eager")
    length = min(NEW_TOKENS, context_length(reference) - PROMPT_TOKENS)
    count = 0
    for prompt in prompts:
        expected, margins = greedy_with_margins(reference, torch.tensor(prompt), length)
        llama.reset()
        tokens = list(islice(llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0), length))
        equal = equal_before_a_tie(expected, margins, tokens, tie=TIE)
        if equal is None:
            raise UnverifiedError(
                f"not exported: llama.cpp's greedy response to {prompt} differs from that of"
                " transformers"
            )
        count += equal
    return count
