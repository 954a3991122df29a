"""What every rank needs, imported and used once in the process that all are forked from."""

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
        load_examples(DataConfig(), step=step, seed=StepConfig.seed)  # it draws them
    logging.disable_progress_bar()
    with TemporaryDirectory() as directory:  # transformers compiles hundreds of patterns at first
        tiny_causal_lm("llama").save_pretrained(directory)
        AutoModelForCausalLM.from_pretrained(directory)


gc.disable()  # it would search what is imported again and again
_load()
gc.freeze()  # and copy those pages in every rank
gc.enable()
