"""The engine in somebody's own loop, by a DeepSpeed configuration."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.engine.checkpoint.find import newest
from pipeline.engine.initialize import Initialized, LoopEngine, initialize
from pipeline.errors import CheckpointError, ConfigError
from pipeline.parallel.mesh import current_mesh
from tests.distributed import rank, run_ranks, world_size
from tests.families import tiny_causal_lm

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear"},
    },
}
ROWS = torch.randint(0, 101, (16, 9), generator=torch.Generator().manual_seed(0))


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def learn(config: dict[str, Any] | str) -> dict[str, Any]:
    model = tiny_causal_lm("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    engine, optimizer, loader, scheduler = initialize(
        model=model,
        config=config,
        training_data=list(ROWS),
        collate_fn=collate,
        total_steps=4,
    )
    assert loader is not None
    stepped = []
    for batch in loader:
        engine.backward(engine(**batch).loss)
        stepped.append(engine.step() is not None)
    with engine.engine.gathered():
        total = sum(param.detach().double().sum().item() for param in model.parameters())
    return {
        "stepped": stepped,
        "steps": engine.global_steps,
        "total": total,
        "dtype": next(model.parameters()).dtype,
        "rate": optimizer.param_groups[0]["lr"],
        "next": scheduler.get_last_lr(),
    }


def test_a_deepspeed_file_trains_in_the_users_loop_on_one_process_and_on_two(
    tmp_path: Path,
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIG))

    alone = learn(CONFIG)
    first, second = run_ranks(learn, str(file))

    assert alone["stepped"] == [False, False, False, True] * 2  # 8 = 2 x 4
    assert first["stepped"] == [False, True] * 2  # 8 = 2 x 2 x 2 processes
    assert first == second
    assert alone["steps"] == first["steps"] == 2
    assert alone["dtype"] == first["dtype"] == torch.bfloat16
    assert alone["next"] == first["next"]


def mean_of_unequal() -> tuple[float, float]:
    """The gradient norm of 1 + 3 tokens: as sums over their number, and as means of means."""
    norms = []
    for divided_by in (4.0, None):
        model = nn.Linear(1, 1, bias=False)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
        engine = initialize(model=model, config=config).engine
        tokens = torch.tensor([[1.0]] if rank() == 0 else [[2.0], [2.0], [2.0]])
        said = engine(tokens)
        engine.backward(said.mean() if divided_by is None else said.sum(), divided_by=divided_by)
        result = engine.step()
        assert result is not None
        norms.append(result.grad_norm)
    return norms[0], norms[1]


def test_unequal_micro_batches_are_weighed_by_their_tokens() -> None:
    assert run_ranks(mean_of_unequal) == [((1 + 2 * 3) / 4, (1 + 2) / 2)] * 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train_batch_size": 7}, "train_batch_size"),
        ({"zero_optimisation": {}}, "did you mean zero_optimization"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert world_size() == 1
    with pytest.raises(ConfigError, match=sentence):
        initialize(model=nn.Linear(1, 1), config=CONFIG | changes)


def learn_in_two_parts(directory: str, *, whole: bool) -> tuple[float, Any]:
    """Sum of the weights after four steps, with a checkpoint in the middle or without."""
    client_state = None
    engine, _, _, _ = fresh()
    for step in range(4):
        if step == 2 and not whole:
            engine.save_checkpoint(directory, client_state={"epoch": 1})
            engine, _, _, _ = fresh()
            client_state = engine.load_checkpoint(directory)
        for rows in ROWS[4 * step : 4 * step + 4].split(2 // world_size()):
            engine.backward(engine(**collate(list(rows))).loss)
            engine.step()
    with engine.engine.gathered():
        params = engine.module.parameters()
        return sum(param.detach().double().sum().item() for param in params), client_state


def fresh() -> Initialized:
    config = {**CONFIG, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2 // world_size()}
    model = tiny_causal_lm("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return initialize(model=model, config=config, total_steps=4)


def test_a_loop_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = run_ranks(partial(learn_in_two_parts, whole=True), str(tmp_path))
    parts = run_ranks(partial(learn_in_two_parts, whole=False), str(tmp_path))

    assert [total for total, _ in parts] == [total for total, _ in whole]
    assert [kept for _, kept in parts] == [{"epoch": 1}] * 2


def save_with_frozen_weights(directory: str) -> list[set[str]]:
    """The frozen weights in the directory after every save: of one engine, then of its heir."""
    found: list[set[str]] = []
    for _ in range(2):
        engine = half_frozen()
        if found:
            engine.load_checkpoint(directory)
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            engine.save_checkpoint(directory)
            found.append({path.name for path in Path(directory).glob("base-*")})
    return found


def half_frozen() -> LoopEngine:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    batch = {"train_batch_size": world_size(), "train_micro_batch_size_per_gpu": 1}
    config = {**CONFIG, **batch, "bf16": {"enabled": False}}
    return initialize(model=model, config=config, total_steps=8).engine


def test_frozen_weights_are_written_to_a_directory_once(tmp_path: Path) -> None:
    after_each_save = run_ranks(save_with_frozen_weights, str(tmp_path))[0]

    assert len(after_each_save[0]) == 1
    assert after_each_save == [after_each_save[0]] * 4


def lose(base: Path) -> None:
    shutil.rmtree(base)


def lose_the_manifest(base: Path) -> None:
    (base / "manifest.json").unlink()


def cut_off(base: Path) -> None:
    file = next(base.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def overwrite(base: Path) -> None:
    """In the middle of the weights, so that only their checksum tells."""
    file = next(base.glob("*.safetensors"))
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)[0]
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 1]))


def save_with_damage(directory: str, damage: Callable[[Path], None], name: str) -> list[str]:
    """What is wrong after each of four saves, before two of which frozen weights are damaged."""
    engine, found = half_frozen(), []
    for step in range(4):
        if step in (1, 3) and rank() == 0:
            for base in Path(directory).glob("base-*"):
                damage(base)
        current_mesh().world.barrier()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.save_checkpoint(directory)
        checkpoint, passed_over = newest(Path(directory))
        if checkpoint is None or checkpoint.step != step + 1 or passed_over:
            found.append(f"{name} before save {step + 1}: {passed_over}")
        current_mesh().world.barrier()
    return found


@pytest.mark.jobs
def test_frozen_weights_that_were_damaged_between_saves_are_written_again(tmp_path: Path) -> None:
    for world in (1, 2):
        for damage in (lose, lose_the_manifest, cut_off, overwrite):
            name = f"{damage.__name__}, {world} processes"
            root = str(tmp_path / name)
            for found in run_ranks(save_with_damage, root, damage, name, world_size=world):
                assert found == []


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        fresh().engine.load_checkpoint(tmp_path)
