"""Generation with the CUDA kernels, run by the emulator, equals generation without them."""

from pathlib import Path

import pytest
import torch

from inference.generation import generate
from pipeline.config import FrozenModelConfig
from pipeline.kernels import choice
from pipeline.models.hf.load import load_causal_lm
from tests.families import random_rows, save_to, tiny_causal_lm
from tests.pipeline.kernels.emulator.emulated import Emulator

PROMPTS = [row.input_ids for row in random_rows((7, 3, 12, 5, 1, 6))]


@pytest.mark.jobs
@pytest.mark.parametrize(("family", "temperature"), [("llama", 1.0), ("mistral", 0.0)])
def test_generation_is_the_same_with_and_without_kernels(
    family: str,
    temperature: float,
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    plain = tiny_causal_lm(family, **sizes)
    model = load_causal_lm(
        FrozenModelConfig(path=save_to(plain, tmp_path)), device=torch.device("cpu")
    )
    model.register_forward_hook(lambda *_: None)  # its modules run each time, as on a GPU
    requested: list[str] = []

    def find_emulated_gpu(_: torch.device, operator: str, *__: object) -> object:
        requested.append(operator)
        return emulator.gpu()

    def generate_ids() -> list[list[int]]:
        responses = generate(
            model,
            PROMPTS,
            max_new_tokens=8,
            temperature=temperature,
            top_p=0.9,
            stop_ids=[2],
            seed=0,
            batch_size=4,
        )
        return [response.ids for response in responses]

    expected = generate_ids()
    monkeypatch.setattr(choice, "use_gpu", lambda *_: True)
    monkeypatch.setattr(choice, "load_kernel", find_emulated_gpu)
    with emulator.memory(*model.parameters()):
        with_kernels = generate_ids()

    assert with_kernels == expected
    # The engine looks for the sampler and for attention, and then the operators themselves do.
    passes = requested.count("sampling") // 2
    assert passes >= 8
    # Prefill appends to the cache without sampling.
    assert requested.count("cache_append") >= passes * model.config.num_hidden_layers
    assert requested.count("decode_attention") >= 2 * 7 * model.config.num_hidden_layers
    assert requested[-1] == "sampling"
