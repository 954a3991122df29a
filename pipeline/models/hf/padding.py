"""Choice of a padding token with which plain `transformers` scores the correct token.

A sequence classifier in `transformers` returns the logits at the last token that isn't the padding
token, regardless of the attention mask. If the end-of-sequence token is used for padding, as with
every tokenizer without a padding token, the score is that of the token before the end of sequence.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

NEW_TOKEN = "<|pad|>"
RESERVED = re.compile(r"pad|reserved|unused|extra", re.IGNORECASE)


def with_padding_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose padding token never ends a text.

    It is `tokenizer` if its padding token is neither the end-of-sequence token nor in the chat
    template (as `<|im_end|>` may be); otherwise a copy that pads with a reserved special token, the
    unknown or beginning-of-sequence token, another special token, or a new one.
    """
    pads_with_eos = tokenizer.pad_token_id in (None, tokenizer.eos_token_id)
    if not pads_with_eos and str(tokenizer.pad_token) not in str(tokenizer.chat_template or ""):
        return tokenizer
    padded = copy.deepcopy(tokenizer)
    padding = _unused_special_token(tokenizer) or NEW_TOKEN
    padded.add_special_tokens({"pad_token": padding})  # only a new token gets a new id
    return padded


def _unused_special_token(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.values()
    unused = [
        token.content
        for token in added
        if token.special and token.content != tokenizer.eos_token and token.content not in template
    ]
    reserved = [token for token in unused if RESERVED.search(token)]
    others = [
        token
        for token in (tokenizer.unk_token, tokenizer.bos_token)
        if token and token != tokenizer.eos_token
    ]
    candidates = [*reserved, *others, *unused]
    return candidates[0] if candidates else None


def add_padding_row(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, with zeros for a new padding token that the input embeddings lack.

    The weights are full tensors, with their names in the model without adapters.
    """
    state = model.state_dict(keep_vars=True)
    # Later pipeline stages have no embedding table.
    table = getattr(model.get_input_embeddings(), "weight", None)
    table_names = {
        name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
        for name, tensor in state.items()
        if tensor is table
    }
    num_rows = cast("int", tokenizer.pad_token_id) + 1
    for name, tensor in weights:
        num_missing = num_rows - len(tensor) if name in table_names else 0
        if num_missing > 0:
            yield name, torch.cat((tensor, tensor.new_zeros(num_missing, *tensor.shape[1:])))
        else:
            yield name, tensor
