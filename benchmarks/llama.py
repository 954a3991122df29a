"""The 15M-parameter Llama of the benchmarks, and a callback that times TRL's steps."""

import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

VOCABULARY = 32_000


def save_llama(directory: str | Path, *, context: int = 512) -> None:
    """Save the model with random weights: hidden 288, 6 layers, tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=288,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


class StepEnds(TrainerCallback):
    """Records when each step of TRL ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record the time."""
        self.ends.append(time.perf_counter())
