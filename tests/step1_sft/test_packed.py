"""Step 1 on packed dialogues: the same rows, batches, losses and weights as on their texts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import DataConfig
from pipeline.data.packed import load_packed
from pipeline.data.prompt_record import PromptRecord, as_hashes
from pipeline.data.stages import StageData, load_examples
from pipeline.data.store.__main__ import main as store
from pipeline.errors import DataError
from pipeline.models.chat import load_chat
from step1_sft.batches import encode
from step1_sft.config import SFTConfig
from step1_sft.train import train
from tests.step1_sft.test_train import logged, result, small_task


def mixed_rows(count: int, name: str = "q") -> list[dict[str, Any]]:
    """Rows of all kinds, many of one prompt: their order is that of their texts."""
    kinds: list[dict[str, Any]] = [
        {"response": "It is {}."},
        {"response": "Well, {}."},
        {"chosen": "So: {}.", "rejected": "No."},
        {"chosen": "So: {}.", "rejected": "No!", "tie": True},
        {},
    ]
    draws = [(7 * n % 5, n * n % (count // 3)) for n in range(count)]
    return [
        {
            "prompt": f"{name} {prompt}?",
            **{k: v.format(n) if isinstance(v, str) else v for k, v in kinds[kind].items()},
        }
        for n, (kind, prompt) in enumerate(draws)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pack(rows: str, config: SFTConfig, *options: str) -> str:
    out = rows.replace(".jsonl", ".tokens")
    words = ["pack", rows, "--tokenizer", str(config.model.path), "--rows", "dialogues"]
    store([*words, *options, "--out", out])
    return out


def with_paths(config: SFTConfig, *paths: str, **data: Any) -> SFTConfig:
    return replace(config, data=replace(config.data, path=paths, **data))


def test_the_rows_and_their_order_are_those_of_the_texts(tmp_path: Path) -> None:
    config = small_task(tmp_path)
    a, b = (write(tmp_path / f"{n}.jsonl", mixed_rows(150, n)) for n in "ab")
    c = write(tmp_path / "c.jsonl", mixed_rows(60, "a"))
    tokens = {rows: pack(rows, config) for rows in (a, b, c)}
    _, chat = load_chat(config.model, config.data)
    known = load_examples(with_paths(config, b).data, step=2, seed=0).prompts
    earlier = PromptRecord(as_hashes(known.trained[:9].tolist()), known.held_out)

    cases: tuple[tuple[list[str], dict[str, Any]], ...] = (
        ([a, b], {}),
        ([f"{a}:1", f"{b}:3"], {"seed": 4, "eval_fraction": 0.2, "max_eval_rows": 5}),
        ([a, a, b], {"split": (1.0, 0.0, 1.0)}),
        ([a, b], {"eval_path": (c,)}),
    )
    for paths, changes in cases:
        data = with_paths(config, *paths, **changes).data
        texts = load_examples(data, step=1, seed=0, earlier=earlier)
        names, held_out = (
            tuple(
                tokens[path.partition(":")[0]] + "".join(path.partition(":")[1:]) for path in each
            )
            for each in (paths, data.eval_path)
        )
        renamed = replace(data, path=names, eval_path=held_out)
        packed = load_packed(renamed, chat, "base", earlier=earlier)

        for rows, dialogues in ((texts.train, packed.train), (texts.eval, packed.eval)):
            assert encode(rows, chat, config) == encode(dialogues, chat, config)
            assert dialogues.lengths.tolist() == [len(each.read()) for each in dialogues]
        assert_same_prompts(texts, packed.prompts)


def assert_same_prompts(texts: StageData, prompts: PromptRecord) -> None:
    assert texts.prompts.trained.tolist() == prompts.trained.tolist()
    assert texts.prompts.held_out.tolist() == prompts.held_out.tolist()


def test_losses_and_weights_are_those_of_the_texts_also_resumed(tmp_path: Path) -> None:
    config = small_task(tmp_path, max_steps=4, save_every=2, eval_every=2)
    texts = config.data.path[0]
    tokens = pack(texts, config)
    packed = with_paths(replace(config, output_dir=tmp_path / "packed"), tokens)

    train(config)
    train(packed)

    weights = (config.output_dir / "model.safetensors").read_bytes()
    assert (packed.output_dir / "model.safetensors").read_bytes() == weights
    for name in ("loss", "grad_norm", "tokens", "eval_perplexity"):
        assert logged(packed, name) == logged(config, name)
    assert result(packed) == result(config)
    (packed.output_dir / "result.json").unlink()
    (packed.output_dir / "model.safetensors").unlink()
    last = packed.output_dir / "checkpoints" / "step_00000004"
    last.rename(tmp_path / "gone")
    train(replace(packed, resume=True))
    assert (packed.output_dir / "model.safetensors").read_bytes() == weights


@pytest.mark.jobs
def test_files_that_step_1_can_not_use_are_refused_in_a_sentence(tmp_path: Path) -> None:
    config = small_task(tmp_path)
    rows = config.data.path[0]
    tokens = pack(rows, config)
    texts = write(tmp_path / "texts.jsonl", [{"text": "a text"}])
    words = ["--tokenizer", str(config.model.path), "--out", f"{tmp_path}/texts.tokens"]
    store(["pack", texts, *words])
    other = write(tmp_path / "other.jsonl", mixed_rows(30))
    pack(other, config, "--train-on", "all")

    for names, changes, sentence in (
        ([tokens, rows], {}, r"rows.jsonl is not a token file, and others are"),
        ([f"{tmp_path}/texts.tokens"], {}, "holds texts, on which step 0 trains"),
        ([f"{tmp_path}/other.tokens"], {}, "packed with train_on all, and data.train_on is assist"),
        ([tokens], {"history": "user"}, "packed with history all, and data.history is user"),
        (
            [tokens],
            {"format": "alpaca"},
            "in the chat format human_assistant, and this step has al",
        ),
    ):
        data = with_paths(config, *names, **changes).data
        _, chat = load_chat(config.model, data)
        with pytest.raises(DataError, match=sentence):
            load_packed(data, chat, "base")
    tokenizer, chat = load_chat(config.model, config.data)
    tokenizer.add_tokens(["<|new|>"])
    data = with_paths(config, tokens).data
    with pytest.raises(DataError, match=r"with the tokenizer .*base, and new has another"):
        load_packed(data, chat, "new")
    with pytest.raises(DataError, match="is a token file, which has no rows of text"):
        load_examples(data, step=2, seed=0)
    content = bytearray(Path(tokens).read_bytes())
    content[-70] ^= 1
    Path(tokens).write_bytes(content)
    with pytest.raises(DataError, match=r"differs from its CRC-32|damaged"):
        load_packed(data, load_chat(config.model, DataConfig())[1], "base")
