"""Imports and caches of every rank, loaded once in the process from which all are forked."""

import gc
from importlib import import_module
from tempfile import TemporaryDirectory


def _load() -> None:
    for name in ("torch.distributed", "peft", "step1_sft.train", "step3_ppo.train"):
        import_module(name)
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from pipeline.config import DataConfig, StepConfig
    from pipeline.data.sharing.steps import load_examples
    from tests.families import tiny_causal_lm

    for step in (1, 2, 3):
        load_examples(DataConfig(), step=step, seed=StepConfig.seed)  # generates and caches them
    logging.disable_progress_bar()
    with TemporaryDirectory() as directory:  # transformers compiles hundreds of patterns
        tiny_causal_lm("llama").save_pretrained(directory)
        AutoModelForCausalLM.from_pretrained(directory)


gc.disable()  # it would scan the imported modules repeatedly
_load()
gc.freeze()  # otherwise every rank would copy their pages
gc.enable()
