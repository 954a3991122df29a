"""A tokenizer of made-up words, each a token: text of a known length for any server."""

from itertools import product
from pathlib import Path
from string import ascii_lowercase

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.llama import VOCABULARY

SPECIAL = ("<s>", "</s>", "<pad>")
SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"
"""What byte-level BPE writes for it."""

LENGTHS = (1, 2, 3, 4)
"""Letters of a word."""


def words() -> list[str]:
    """As many words as the vocabulary has room for, the shorter ones first."""
    room = VOCABULARY - len(SPECIAL) - len(pre_tokenizers.ByteLevel.alphabet())
    found = ["".join(each) for size in LENGTHS for each in product(ascii_lowercase, repeat=size)]
    return found[:room]


def save_words(directory: Path) -> None:
    """Write the tokenizer: byte-level BPE, in which a space and a word are one token."""
    found = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(SPACE + word[:-1], word[-1]) for word in words()]
    vocabulary = {token: number for number, token in enumerate([*found, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(directory)


def some_words(count: int) -> str:
    """A text of that many random tokens."""
    known = words()
    places = torch.randint(len(known), (count,)).tolist()
    return "".join(f" {known[place]}" for place in places)
