"""LoRA: adapters and heads are trained, the base is not, and exports match the trained model."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.config import LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.data.batches import collate
from pipeline.demo.model import build_tokenizer
from pipeline.engine.engine import Engine
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.forward import Policy, Scorer
from pipeline.models.forward.packing import small_copy
from pipeline.models.hf.export import export
from pipeline.models.trained import prepare_causal_lm, prepare_classifier
from pipeline.system.errors import ConfigError
from tests.families import random_rows, tiny_causal_lm
from tests.pipeline.models.adapters.quantized_models import save_base

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8.0)
BATCH = collate(random_rows((9, 4, 7)))
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def settings(path: str, **changes: object) -> TrainedModelConfig:
    optim = OptimConfig(lr=0.02, schedule="constant", warmup_ratio=0.0, weight_decay=0.1)
    return TrainedModelConfig(path=path, optim=optim, **{"lora": LORA, **changes})


def train(wrapper: nn.Module, config: TrainedModelConfig, *, steps: int = 3) -> nn.Module:
    """Return the wrapped model after a few training steps."""
    engine = Engine(wrapper, config, total_steps=steps)
    for _ in range(steps):
        output = engine(BATCH)
        engine.backward((output if isinstance(output, Tensor) else output.logprobs).square().mean())
        engine.step()
    return wrapper.model.eval()


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: param.detach().clone()
        for name, param in model.named_parameters()
        if not param.requires_grad
    }


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_export_is_merged_and_its_adapter_loads_on_the_base(family: str, tmp_path: Path) -> None:
    config = settings(save_base(family, tmp_path / "base"))
    model = prepare_causal_lm(config, build_tokenizer(), device=CPU, seed=0)
    frozen = frozen_weights(model)
    with torch.enable_grad():
        train(Policy(model), config)

    export(model, build_tokenizer(), tmp_path / "out")

    adapted = model(input_ids=IDS).logits
    original = AutoModelForCausalLM.from_pretrained(config.path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(config.path), str(tmp_path / "out" / "adapter")
    )
    with model.disable_adapter():
        base_logits = model(input_ids=IDS).logits
    assert (adapted - original(input_ids=IDS).logits).abs().max() > 0.1
    torch.testing.assert_close(merged(input_ids=IDS).logits, adapted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(adapter(input_ids=IDS).logits, adapted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(base_logits, original(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    # Exporting merges into copies: the base has the same bits as before.
    assert frozen
    assert all(torch.equal(frozen[name], after) for name, after in frozen_weights(model).items())
    assert set(merged.state_dict()) == set(original.state_dict())


def test_tokens_without_embeddings_are_named(tmp_path: Path) -> None:
    config, tokenizer = settings(save_base("llama", tmp_path)), build_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<extra pad>"})

    with pytest.raises(ConfigError, match=r"has no embeddings for '<extra pad>' of the tokenizer"):
        prepare_causal_lm(config, tokenizer, device=CPU, seed=0)


def test_new_adapters_do_not_reseed_the_dropout_of_gpus() -> None:
    model, seeds = tiny_causal_lm("llama"), torch.cuda._lazy_seed_tracker
    before = [*seeds.get_calls()]  # PyTorch keeps them until it initializes CUDA

    small_copy(type(model), model.config)
    add_lora(model, LORA, task="causal", seed=5)

    assert seeds.get_calls() == before


@torch.no_grad()
def test_rslora_scales_by_root_of_rank_in_training_and_export(tmp_path: Path) -> None:
    lora = LoraConfig(rank=4, alpha=8.0, variant="rslora")
    config = settings(save_base("llama", tmp_path / "base"), lora=lora)
    model = prepare_causal_lm(config, build_tokenizer(), device=CPU, seed=0)
    with torch.enable_grad():
        train(Policy(model), config)
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    before = layer.base_layer.weight.clone()

    export(model, build_tokenizer(), tmp_path / "out")

    update = 8.0 / 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weight = exported.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(weight, before + update, rtol=1e-6, atol=1e-7)
    adapter = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(config.path), str(tmp_path / "out" / "adapter")
    )
    adapted = model(input_ids=IDS).logits
    torch.testing.assert_close(adapter(input_ids=IDS).logits, adapted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_reward_head_is_trained_and_exported_with_its_adapter(tmp_path: Path) -> None:
    config = settings(save_base("llama", tmp_path / "base"))
    model = prepare_classifier(config, build_tokenizer(), device=CPU, seed=0)
    head = model.base_model.model.score.modules_to_save["default"].weight
    before = head.clone()
    with torch.enable_grad():
        train(Scorer(model), config)

    export(model, build_tokenizer(), tmp_path / "out")

    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    fresh = AutoModelForSequenceClassification.from_pretrained(config.path, num_labels=1)
    adapter = PeftModel.from_pretrained(fresh, str(tmp_path / "out" / "adapter"))
    scores = Scorer(model).final_scores(collate(random_rows((5,))))
    ids = torch.tensor([random_rows((5,))[0].input_ids])
    assert not torch.equal(head, before)
    assert torch.equal(merged.score.weight, head)
    torch.testing.assert_close(merged(input_ids=ids).logits[0], scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(adapter(input_ids=ids).logits[0], scores, rtol=1e-4, atol=1e-4)
