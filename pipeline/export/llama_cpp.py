"""A GGUF file read by llama.cpp itself, where its Python package is installed."""

import importlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.config import FrozenModelConfig
from pipeline.export.aside import UnverifiedError
from pipeline.export.gguf_file import GgufPlan
from pipeline.export.greedy import equal_before_a_tie, greedy_with_margins
from pipeline.export.texts import compare_tokens
from pipeline.models.forward import context_length
from pipeline.models.load import load_causal_lm

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 16, 64
F32 = 0
"""ggml's number of the format, for the cache of keys and values."""

TIE = 2e-3
"""Margin of two logits, in units of the largest, that llama.cpp's rounding may decide: with GPT-2's
GELU its logits differ from torch's by 1e-3 in f32 (6e-4 of the largest), with SwiGLU by 2e-6."""


class _Llama(Protocol):
    """What of `llama_cpp.Llama` is used to generate."""

    def reset(self) -> None: ...

    def generate(
        self, tokens: Sequence[int], *, top_k: int, temp: float, repeat_penalty: float
    ) -> Iterator[int]: ...


def verify_by_llama_cpp(
    plan: GgufPlan, file: Path, texts: Sequence[str], expected: Sequence[Sequence[int]]
) -> list[str]:
    """What llama.cpp finds equal: the tokens of the texts and, of an f32 file, greedy responses.

    Raises:
        UnverifiedError: it can't load the file, or something differs.
    """
    # Looked up by name: it is an optional package, without types here.
    llama: Any = importlib.import_module("llama_cpp")
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
    compare_tokens(
        texts,
        expected,
        lambda text: model.tokenize(text.encode(), add_bos=False, special=True),
        by="llama.cpp",
    )
    verified = [f"{len(texts)} texts have equal tokens by llama.cpp"]
    if plan.number_format == "f32":
        prompts = [list(ids[:PROMPT_TOKENS]) for ids in expected if len(ids) >= PROMPT_TOKENS]
        count = _greedy(plan, model, prompts[:PROMPTS])
        verified.append(f"{count} greedy tokens are equal by llama.cpp, up to ties of two logits")
    model.close()
    return verified


def _greedy(plan: GgufPlan, model: _Llama, prompts: Sequence[list[int]]) -> int:
    """How many greedy tokens are equal, of each response those before a tie."""
    config = FrozenModelConfig(path=str(plan.source.directory), precision="fp32")
    reference = load_causal_lm(config, device=torch.device("cpu"))
    reference.set_attn_implementation("eager")
    length = min(NEW_TOKENS, context_length(reference) - PROMPT_TOKENS)
    count = 0
    for prompt in prompts:
        expected, margins = greedy_with_margins(reference, torch.tensor(prompt), length)
        model.reset()
        found = list(islice(model.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0), length))
        equal = equal_before_a_tie(expected, margins, found, tie=TIE)
        if equal is None:
            raise UnverifiedError(
                f"not exported: llama.cpp's greedy response to {prompt} is another one than"
                " that of transformers"
            )
        count += equal
    return count
