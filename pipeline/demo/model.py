"""The embedded model: a small Llama and its SentencePiece tokenizer, both made on the spot."""

import io
from functools import cache

import sentencepiece
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.demo.task import corpus

VOCABULARY = 1280
"""Pieces of the tokenizer: 4 special ones, 256 bytes, characters, and words of the task."""

CONTEXT = 256
"""Positions of the model: several turns of a chat."""

SPECIAL = UNKNOWN, BEGIN, END, PADDING = ("<unk>", "<s>", "</s>", "<pad>")
"""The special tokens; their ids are 0 to 3."""

LINE_BREAKS = ("\n\n", "\n")
"""Pieces in their own right: SentencePiece takes no piece from more than one line."""

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""A space in the pieces of SentencePiece."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded model, trained on the embedded task; the same on every call.

    Digits stay single, any other text falls back to bytes, and text is taken as it is: no space is
    added in front, so a prompt and its response may be tokenized apart and their ids joined.
    Encoding puts `<s>` in front, as Llama's tokenizers do. There is no chat template: the format of
    the run decides.
    """
    pieces = _sentencepiece_pieces()
    ids = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        BPE(
            vocab=ids,
            merges=_merges(pieces),
            unk_token=UNKNOWN,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
        special_tokens=[(BEGIN, ids[BEGIN])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PADDING,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    *, vocab_size: int, seed: int, hidden_size: int = 128, num_layers: int = 4, tied: bool = True
) -> LlamaForCausalLM:
    """The embedded Llama with random fp32 weights, a million for the tokenizer's vocabulary.

    With `tied` the embeddings are the output matrix, too. The weights depend on `seed`, the sizes
    and `tied` alone, and the global random state is left as it was.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        # The usual 0.02 suits hidden sizes in the thousands; from here so narrow a model learns
        # several times as fast.
        initializer_range=0.05,
        tie_word_embeddings=tied,
        bos_token_id=SPECIAL.index(BEGIN),
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PADDING),
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


@cache
def _sentencepiece_pieces() -> tuple[str, ...]:
    """The pieces of a SentencePiece BPE model of the task's text, by id."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # Each text as a dialogue and as it stands, so that its first word becomes one piece with
        # and without a space in front.
        sentence_iterator=iter(
            form
            for text in corpus()
            for form in (f"\n\nHuman: {text}", f"\n\nAssistant: {text}", text)
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        unk_id=SPECIAL.index(UNKNOWN),
        bos_id=SPECIAL.index(BEGIN),
        eos_id=SPECIAL.index(END),
        pad_id=SPECIAL.index(PADDING),
        user_defined_symbols=list(LINE_BREAKS),
        split_digits=True,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return tuple(trained.id_to_piece(i) for i in range(trained.vocab_size()))


def _merges(pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    """Pairs of pieces that are merged, earliest first.

    SentencePiece joins any two neighbours whose union is a piece, the piece with the lowest id
    first; a list of merges is equivalent.
    """
    known = set(pieces) - set(SPECIAL)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece in known and piece[:cut] in known and piece[cut:] in known
    ]
