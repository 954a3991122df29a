"""A real, trained model: 260,000 parameters that tell stories."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from inference.generation import generate
from pipeline.models.load import load_for_inference

SHARED = Path(
    os.environ.get("RLHF_SHARED_DATA", Path(__file__).resolve().parents[2].parent / "shared/data")
)
STORIES = SHARED / "stories260k"
BEGINNINGS = ["Once upon a time", "Lily had a", "The dog", "One day, a boy named Tim went to the"]


@pytest.mark.jobs
@pytest.mark.skipif(not STORIES.is_dir(), reason=f"no trained model in {STORIES}")
def test_two_hundred_greedy_tokens_are_those_of_transformers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    prompts = [tokenizer(text)["input_ids"] for text in BEGINNINGS]
    plain = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval()
    settings = GenerationConfig(
        max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    expected = [
        plain.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :]
        for prompt in prompts
    ]
    model, _ = load_for_inference(STORIES, precision="fp32")

    responses = generate(
        model, prompts, max_new_tokens=200, temperature=0.0, stop_ids=[], seed=0, batch_size=3
    )

    assert [response.ids for response in responses] == [ids.tolist() for ids in expected]
