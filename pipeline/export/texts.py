"""Texts on which two tokenizers are compared."""

import random
import unicodedata
from collections.abc import Sequence
from itertools import islice

from transformers import PreTrainedTokenizerBase

from pipeline.demo.task import corpus
from pipeline.export.aside import UnverifiedError
from pipeline.export.gguf_tokenize import Encode

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


def make_texts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """`count` texts, the same on every call.

    Sentences, words of many alphabets with spaces and line breaks of all kinds, pieces of the
    vocabulary in random order, and special tokens.
    They are in Unicode's composed form (NFC), into which some tokenizers bring a text first and
    llama.cpp never does.
    """
    draw = random.Random(0)
    ours = sorted(tokenizer.get_vocab().values())
    special = [str(token) for token in tokenizer.all_special_tokens]
    sentences = list(islice(corpus(), 1000))
    texts = [
        *(_of_sentences(draw, sentences) for _ in range(count // 3)),
        *(_of_words(draw, special) for _ in range(count // 3)),
    ]
    while len(texts) < count:
        ids = draw.choices(ours, k=draw.randint(1, 30))
        texts.append(str(tokenizer.decode(ids, skip_special_tokens=True)).replace("\ufffd", ""))
    return [unicodedata.normalize("NFC", text) for text in texts]


def compare_tokens(
    texts: Sequence[str], expected: Sequence[Sequence[int]], encode: Encode, *, by: str
) -> None:
    """Raise UnverifiedError at the first text whose tokens differ."""
    for text, ids in zip(texts, expected, strict=True):
        found = encode(text)
        if found != list(ids):
            raise UnverifiedError(
                f"not exported: {text[:60]!r} has {len(ids)} tokens by the tokenizer and"
                f" {len(found)}, other ones, by {by}; export it with --to onnx"
            )


def _of_sentences(draw: random.Random, sentences: Sequence[str]) -> str:
    return draw.choice(GAPS).join(draw.choices(sentences, k=draw.randint(1, 3)))


def _of_words(draw: random.Random, special: Sequence[str]) -> str:
    words: list[str] = []
    for _ in range(draw.randint(1, 12)):
        letters = draw.choice(ALPHABETS)
        words += ["".join(draw.choices(letters, k=draw.randint(1, 9))), draw.choice(GAPS)]
        if special and draw.random() < 0.1:
            words.append(draw.choice(special))
    return "".join(words)
