"""Exports are plain Hugging Face directories, which are replaced atomically."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pipeline.config import DataConfig, LoraConfig, OptimConfig, TrainedModelConfig
from pipeline.config.model import ZeroConfig
from pipeline.data.batches import collate
from pipeline.demo.model import build_tokenizer
from pipeline.engine.engine import Engine
from pipeline.files.safetensors_header import INDEX, SINGLE, stored_tensors
from pipeline.models.adapters.lora import add_lora
from pipeline.models.forward.forward import Policy, Scorer
from pipeline.models.hf.chat import load_chat
from pipeline.models.hf.export import as_saved, can_stream, export, set_stop_tokens, stream_export
from pipeline.models.trained import prepare_causal_lm, prepare_classifier
from tests.distributed import rank, run_ranks, world_size
from tests.families import FAMILIES, UNPACKED, random_rows, save_to, tiny_causal_lm, tiny_classifier
from tests.mixtures import MIXTURES, tiny_mixture
from tests.pipeline.engine.checkpoint.power import lose_power, record
from tests.pipeline.engine.checkpoint.saving import run_processes

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def export_recorded(_rank: int, _world_size: int, out: Path, journal: Path) -> None:
    model = add_lora(tiny_causal_lm("llama", seed=2), LoraConfig(rank=2), task="causal", seed=0)
    record(journal)
    export(model, build_tokenizer(), out)


@torch.no_grad()
def test_finished_export_survives_a_loss_of_power(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(tiny_causal_lm("llama", seed=1), build_tokenizer(), out)

    codes = run_processes(export_recorded, out, tmp_path / "journal", world_size=1)
    lose_power(out, tmp_path / "journal")

    assert codes == [0]
    loaded = AutoModelForCausalLM.from_pretrained(out)
    expected = tiny_causal_lm("llama", seed=2)
    assert torch.equal(loaded(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert (out / "adapter" / "adapter_model.safetensors").stat().st_size > 0


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the content of every file below `directory`."""
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("family", [*FAMILIES, *UNPACKED, *MIXTURES])
def test_export_matches_save_pretrained_bytewise(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    model = tiny_mixture(family) if family in MIXTURES else tiny_causal_lm(family)
    model.config.pad_token_id = 2
    assert can_stream(model)

    export(model, build_tokenizer(), tmp_path / "ours")

    model.save_pretrained(tmp_path / "plain")
    build_tokenizer().save_pretrained(tmp_path / "plain")
    assert read_files(tmp_path / "ours") == read_files(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "lm_head")])
def test_exported_adapter_matches_peft_bytewise(targets: tuple[str, ...], tmp_path: Path) -> None:
    model = add_lora(tiny_causal_lm("llama"), LoraConfig(targets=targets), task="causal", seed=0)

    export(model, build_tokenizer(), tmp_path / "ours")

    model.save_pretrained(str(tmp_path / "plain"))
    assert read_files(tmp_path / "ours" / "adapter") == read_files(tmp_path / "plain")


def test_export_keeps_all_stop_tokens(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama", vocab_size=1280)
    save_to(model, tmp_path / "start")
    sampling = {"temperature": 0.9, "top_p": 0.6}  # as in Llama 2: without do_sample
    declared = json.dumps({"eos_token_id": [7, 2, 9], **sampling})
    (tmp_path / "start" / "generation_config.json").write_text(declared)
    build_tokenizer().save_pretrained(tmp_path / "start")
    config = TrainedModelConfig(path=str(tmp_path / "start"))
    chat = load_chat(config, DataConfig(format="chatml"))
    tokenizer = chat.tokenizer
    trained = prepare_causal_lm(config, tokenizer, device=CPU, seed=0)
    set_stop_tokens(trained, chat.stop_ids)

    export(trained, tokenizer, tmp_path / "out")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert loaded.eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>"), 2, 7, 9]
    assert sampling.items() <= loaded.to_dict().items()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("causal", {"precision": "bf16"}),
    "LoRA": ("causal", {"lora": LoraConfig(rank=4)}),
    "reward": ("classifier", {"lora": LoraConfig(rank=4)}),
}


def make_engine(
    path: str, stage: int, task: str, changes: dict[str, Any]
) -> tuple[nn.Module, Engine]:
    """Return a model trained for two steps on two micro-batches that the ranks share."""
    config = TrainedModelConfig(
        path=path,
        zero_stage=stage,
        zero=ZeroConfig(reduction="deterministic"),
        optim=OptimConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0),
        **changes,
    )
    build = prepare_causal_lm if task == "causal" else prepare_classifier
    model = build(config, build_tokenizer(), device=CPU, seed=0)
    engine = Engine(Policy(model) if task == "causal" else Scorer(model), config, total_steps=2)
    for _ in range(2):
        for seed in range(rank(), 2, world_size()):
            out = engine(collate(random_rows((9, 4, 7), seed=seed)))
            engine.backward((out if isinstance(out, Tensor) else out.logprobs).square().mean())
        engine.step()
    return model, engine


def export_trained(paths: dict[str, str], out: str, stage: int) -> None:
    for name, (task, changes) in CASES.items():
        model, engine = make_engine(paths[task], stage, task, changes)
        export(model, build_tokenizer(), Path(out) / name, weights=engine)


@pytest.mark.jobs
def test_sharded_export_matches_one_process_bytewise(tmp_path: Path) -> None:
    size = len(build_tokenizer())
    lm = tiny_causal_lm("llama", vocab_size=size, tie_word_embeddings=True)
    paths = {
        "causal": save_to(lm, tmp_path / "lm"),
        "classifier": save_to(tiny_classifier("gpt2", vocab_size=size), tmp_path / "reward"),
    }

    for processes, stage in ((1, 0), (2, 0), (2, 3)):
        out = str(tmp_path / f"{processes} at {stage}")
        run_ranks(export_trained, paths, out, stage, world_size=processes)

    expected = read_files(tmp_path / "1 at 0")
    assert "LoRA/adapter/adapter_model.safetensors" in expected
    assert expected["LoRA/model.safetensors"] != (tmp_path / "lm" / SINGLE).read_bytes()
    for directory in ("2 at 0", "2 at 3"):
        files = read_files(tmp_path / directory)
        assert files.keys() == expected.keys()
        assert [name for name in files if files[name] != expected[name]] == []


def export_in_shards(model: PreTrainedModel, directory: Path, **settings: Any) -> list[str]:
    """Export a model's state and return the names of the weight files."""
    model.config.save_pretrained(directory)
    state = model.state_dict().items()
    named = [(name, x) for name, x in state if name not in model.all_tied_weights_keys]
    stream_export(as_saved(model, named), directory, **settings)
    return sorted(path.name for path in directory.iterdir() if path.name != "config.json")


def assert_loads_as(model: PreTrainedModel, directory: Path) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt2", *UNPACKED])
def test_shards_load_in_transformers_with_equal_tensors(family: str, tmp_path: Path) -> None:
    model = tiny_causal_lm(family)

    files = export_in_shards(model, tmp_path, max_shard_bytes=10_000)

    assert len(files) > 2
    assert_loads_as(model, tmp_path)


def make_weights(value: float, *, shards: int) -> tuple[list[tuple[str, Tensor]], int]:
    """Return six weights of one value, and the shard size that splits them into `shards` files."""
    return [(f"w{index}", torch.full((10,), value)) for index in range(6)], 240 // shards


class Killed(BaseException):
    """Simulates that the process is killed."""


@pytest.mark.parametrize("new_shards", [1, 2, 3])
@pytest.mark.parametrize("old_shards", [1, 3])
def test_export_killed_at_any_moment_never_mixes_weights(
    old_shards: int, new_shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, old_size = make_weights(1.0, shards=old_shards)
    new, new_size = make_weights(2.0, shards=new_shards)
    stream_export(old, tmp_path / "old", max_shard_bytes=old_size)
    outcomes = []

    for moment in range(20):
        directory = tmp_path / f"killed at {moment}"
        shutil.copytree(tmp_path / "old", directory)
        remaining = moment
        with monkeypatch.context() as patch:
            for change in ("replace", "unlink"):
                real = getattr(Path, change)

                def killing(path: Path, *args: Any, real: Any = real, **kwargs: Any) -> Any:
                    nonlocal remaining
                    if remaining == 0:
                        raise Killed
                    remaining -= 1
                    return real(path, *args, **kwargs)

                patch.setattr(Path, change, killing)
            try:
                stream_export(new, directory, max_shard_bytes=new_size)
            except Killed:
                pass
            else:
                outcomes.append("done")
        outcomes.append(read_value(directory))
        if "done" in outcomes:
            break

    assert outcomes[0] == 1.0
    assert set(outcomes) <= {1.0, 2.0, None, "done"}
    assert outcomes[-2:] == ["done", 2.0]
    names = {path.name for path in directory.iterdir()}
    assert len(names) == (1 if new_shards == 1 else new_shards + 1)


def read_value(directory: Path) -> float | None:
    """Return the value of all weights in a directory, or None if it has no weights."""
    if not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return None
    files = {tensor.file for tensor in stored_tensors(directory).values()}
    pieces = [tensor.flatten()[:10] for file in files for tensor in load_file(file).values()]
    (value,) = torch.stack(pieces).unique().tolist()
    return value
