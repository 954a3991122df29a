"""Loading models: rows of new tokens, pickles, and missing heads."""

from pathlib import Path

import pytest
import torch

from pipeline.config import FrozenModelConfig
from pipeline.demo.model import build_tokenizer
from pipeline.models.hf.load import add_tokens, load_causal_lm, load_classifier
from pipeline.system.errors import ModelError
from tests.families import tiny_causal_lm, tiny_classifier

CPU = torch.device("cpu")


def test_rows_of_new_tokens_depend_only_on_the_seed() -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    models = [tiny_causal_lm("llama", vocab_size=len(tokenizer) - 2) for _ in range(3)]
    original = models[0].get_input_embeddings().weight.clone()

    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.rand(seed)  # changes the random state
        add_tokens(model, tokenizer, seed=seed)

    first, repeated, other_seed = (model.get_input_embeddings().weight for model in models)
    assert first.shape[0] == len(tokenizer)
    assert torch.equal(first[:-2], original)
    assert torch.equal(first, repeated)
    assert not torch.equal(first[-2:], other_seed[-2:])


def test_cached_hub_model_that_fails_to_load_is_not_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "unknown"}')

    with pytest.raises(ModelError, match=r"^the config.json of owner/name can't be loaded"):
        load_causal_lm(FrozenModelConfig(path="owner/name"), device=CPU)


def test_pickle_is_loaded_only_if_allowed(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama")
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a pickle that can run code"):
        load_causal_lm(FrozenModelConfig(path=str(tmp_path)), device=CPU, seed=0)
    allowed = FrozenModelConfig(path=str(tmp_path), allow_pickle=True)
    loaded = load_causal_lm(allowed, device=CPU, seed=0)

    for name, param in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), param)


def test_pickle_that_runs_code_is_never_executed(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    tiny_causal_lm("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    attack = b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    (tmp_path / "pytorch_model.bin").write_bytes(attack)

    for allowed in (False, True):
        with pytest.raises(ModelError):
            load_causal_lm(
                FrozenModelConfig(path=str(tmp_path), allow_pickle=allowed), device=CPU, seed=0
            )

    assert not canary.exists()


def test_reward_model_without_a_score_head_raises(tmp_path: Path) -> None:
    model = tiny_classifier("llama")
    state = {name.replace("score", "v_head"): x for name, x in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)

    with pytest.raises(ModelError, match=r"not a reward model: its files lack score\.weight"):
        load_classifier(FrozenModelConfig(path=str(tmp_path)), device=CPU)
