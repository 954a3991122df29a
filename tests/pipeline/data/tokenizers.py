"""Small tokenizers that differ at the boundaries between turns."""

import os
from pathlib import Path

import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXTS = [
    "Human: Hi there.\n\nAssistant: Hello you! user assistant system How are you? Fine, so."
] * 3
SHARED_DATA = Path(
    os.environ.get("RLHF_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data")
)


def byte_level(*, bos: bool = False) -> PreTrainedTokenizerBase:
    """Build a tokenizer like GPT-2's (pad = eos) or, with `bos`, OPT's: texts begin with <s>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        bos_token="<s>" if bos else None,
    )


def metaspace(scheme: str = "always") -> PreTrainedTokenizerBase:
    """Build a SentencePiece tokenizer as in current Llama models: texts begin with <s> and ▁."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return _sentencepiece(backend, [decoders.Metaspace(prepend_scheme=scheme, split=False)])


def prepending() -> PreTrainedTokenizerBase:
    """Build a SentencePiece tokenizer as in older Llama models: a normalizer prepends ▁."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    strip = decoders.Strip(" ", 1, 0)
    return _sentencepiece(backend, [decoders.Replace("▁", " "), decoders.Fuse(), strip])


def _sentencepiece(backend: Tokenizer, last_decoders: list) -> PreTrainedTokenizerBase:
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), *last_decoders])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def stories() -> PreTrainedTokenizerBase:
    """Return the real tokenizer of stories260k."""
    path = SHARED_DATA / "stories260k"
    if not path.is_dir():
        pytest.skip(f"no tokenizer in {path}")
    return AutoTokenizer.from_pretrained(path)


KINDS = {
    "byte level, pad = eos": byte_level,
    "byte level with bos": lambda: byte_level(bos=True),
    "metaspace always": metaspace,
    "metaspace first": lambda: metaspace("first"),
    "prepend": prepending,
    "stories260k": stories,
}
