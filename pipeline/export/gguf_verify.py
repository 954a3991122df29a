"""Is a GGUF file what was to be written? Read back by the `gguf` package and by llama.cpp."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.export.aside import UnverifiedError
from pipeline.export.gguf_file import ROPE_FACTORS, GgufPlan, qualified
from pipeline.export.gguf_numbers import is_read_back
from pipeline.export.gguf_tokenize import tokenize_with
from pipeline.export.gguf_vocabulary import Vocabulary
from pipeline.export.packages import has_llama_cpp
from pipeline.export.texts import compare_tokens, make_texts

if TYPE_CHECKING:
    from gguf import GGUFReader

KEY = "tokenizer.ggml."


def verify_gguf(plan: GgufPlan, file: Path, *, texts: int) -> list[str]:
    """What was verified, in sentences.

    Raises:
        UnverifiedError: a tensor or the tokens of a text differ.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    verified = [_tensors(plan, reader), _stops(plan, reader)]
    samples = make_texts(plan.tokenizer, texts)
    expected = [plan.tokenizer.encode(text, add_special_tokens=False) for text in samples]
    read = tokenize_with(vocabulary_in(reader))
    compare_tokens(samples, expected, read, by="the file's vocabulary")
    verified.append(f"{len(samples)} texts have equal tokens by the vocabulary of the file")
    if has_llama_cpp():
        from pipeline.export.llama_cpp import verify_by_llama_cpp

        return verified + verify_by_llama_cpp(plan, file, samples, expected)
    return verified


def vocabulary_in(reader: "GGUFReader") -> Vocabulary:
    """The vocabulary that a file has, from nothing else."""
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


def _value(reader: "GGUFReader", key: str) -> Any:  # noqa: ANN401  # whatever the key has
    field = reader.get_field(KEY + key)
    return None if field is None else field.contents()


def _tensors(plan: GgufPlan, reader: "GGUFReader") -> str:
    found = {tensor.name: tensor for tensor in reader.tensors}
    extra = found.keys() - set(plan.names.values()) - {ROPE_FACTORS}
    if extra or len(set(plan.names.values())) != len(plan.names):
        raise UnverifiedError(f"not exported: the file has tensors of its own, {sorted(extra)}")
    for stored, name in plan.names.items():
        tensor = found.get(name)
        ours = qualified(stored, plan.family)
        laid_out = plan.family.layout(ours, plan.tensor(stored), plan.source.settings)
        wanted = plan.format_of(stored)
        if (
            tensor is None
            or tensor.tensor_type.name.lower() != wanted
            or tuple(map(int, tensor.shape[::-1])) != tuple(laid_out.shape)
            or not is_read_back(_bytes(tensor.data), laid_out, wanted)
            or not torch.equal(
                plan.family.original(ours, laid_out, plan.source.settings), plan.tensor(stored)
            )
        ):
            raise UnverifiedError(f"not exported: {stored} was not read back as it was written")
    formats = [plan.format_of(stored) for stored in plan.names]
    counts = ", ".join(f"{formats.count(each)} in {each}" for each in dict.fromkeys(formats))
    how = "within half a step of their scales" if "q8_0" in formats else "equal"
    return f"{len(plan.names)} tensors read back {how}: {counts}"


def _bytes(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.uint8)


def _stops(plan: GgufPlan, reader: "GGUFReader") -> str:
    ends = [_value(reader, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    template = reader.get_field("tokenizer.chat_template")
    same_template = (None if template is None else template.contents()) == (
        plan.tokenizer.chat_template if isinstance(plan.tokenizer.chat_template, str) else None
    )
    if [each for each in ends if each is not None] != list(plan.stop_ids) or not same_template:
        raise UnverifiedError("not exported: chat template or stop ids were not read back")
    what = "chat template and stop ids" if template is not None else "stop ids (no chat template)"
    return f"{what} read back equal"
