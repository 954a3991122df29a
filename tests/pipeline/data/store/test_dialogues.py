"""Dialogues in token files: what is learned stays beside the tokens, through every command."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import DataConfig
from pipeline.data.chat_format import ChatFormat
from pipeline.data.prompt_hash import content_hash, prompt_hash
from pipeline.data.resolve_format import resolve_format
from pipeline.data.shapes import read_row
from pipeline.data.sources import Row
from pipeline.data.store import layout as layouts
from pipeline.data.store import pieces
from pipeline.data.store import reader as readers
from pipeline.data.store import writer as writers
from pipeline.data.store.__main__ import main
from pipeline.data.store.check import findings
from pipeline.data.store.config import PackConfig
from pipeline.data.store.marks import Marks
from pipeline.data.store.pack import pack
from pipeline.data.store.reader import TokenFile
from pipeline.data.store.sources import find_sources
from pipeline.data.store.vocabulary import vocabulary_of
from pipeline.errors import ConfigError, DataError
from tests.pipeline.data.store.corpus import EOS, write_tokens
from tests.pipeline.data.tokenizers import byte_level

CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1", "weight": 0},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "It is 2."},
]
ROWS = [
    {"prompt": "One?", "response": "It is 1."},
    {"messages": CHAT},
    {"prompt": "One?", "chosen": "Good.", "rejected": "Bad."},
    {"prompt": "One?", "chosen": "Good.", "rejected": "Worse.", "tie": True},
    {"prompt": "Alone?"},
    {"prompt": "Empty?", "response": "  "},
    {"text": "A text without roles."},
    {"prompt": "Three?", "response": "No.", "label": False},
]
HAS_USES = {0: 5, 1: 5, 2: 7, 3: 4, 4: 4, 6: 1, 7: 4}
"""Bits of demonstrations, pairs and prompts, by row; row 5 has nothing to learn from."""


@pytest.fixture
def chat() -> ChatFormat:
    return resolve_format(byte_level(), "human_assistant")


def write(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def packed(source: Path, out: Path, chat: ChatFormat, **values: object) -> TokenFile:
    settings = PackConfig(tokenizer="b", out=out, rows="dialogues", **values)  # pyright: ignore[reportArgumentType]
    pack(find_sources([str(source)]), vocabulary_of(chat.tokenizer, "b"), settings, chat)
    return TokenFile(out)


def documents(file: TokenFile) -> list[tuple[list[int], list[bool], tuple[int, ...]]]:
    assert not list(findings(file))
    spans = [file.span(n) for n in range(file.documents)]
    return [
        (file.slice(*span).tolist(), file.trained(*span).tolist(), file.records(n, n + 1)[0].item())
        for n, span in enumerate(spans)
    ]


@pytest.mark.parametrize("history", ["all", "last:1"])
def test_documents_are_the_rows_as_step_1_encodes_them(
    tmp_path: Path, chat: ChatFormat, history: str
) -> None:
    file = packed(write(tmp_path / "a.jsonl", ROWS), tmp_path / "a.tokens", chat, history=history)

    expected = []
    for number, bits in HAS_USES.items():
        example = read_row(Row(ROWS[number], "row"), {})
        assert example is not None
        prompt = example.prompt[-1:] if history == "last:1" else example.prompt
        ids, trained = [chat.tokenizer.eos_token_id], [False]
        if bits & 1:
            encoded = chat.encode(prompt, example.chosen)
            ids, trained = encoded.input_ids, encoded.trained
        expected.append((ids, trained, (prompt_hash(example), content_hash(example), bits)))
    assert documents(file) == expected
    rendering = file.origin.rendering
    assert rendering is not None
    assert (rendering.format, rendering.history, rendering.left_out) == (
        "human_assistant",
        history,
        1,
    )


def test_the_file_is_the_same_for_any_number_of_workers_and_resumed(
    tmp_path: Path, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end at tokens of any number, so that bits of one byte come from two of them."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 300)
    write(tmp_path / "a.jsonl", ROWS * 30)
    straight = packed(tmp_path / "a.jsonl", tmp_path / "1.tokens", chat)
    parallel = packed(tmp_path / "a.jsonl", tmp_path / "2.tokens", chat, workers=2)
    assert straight.path.read_bytes() == parallel.path.read_bytes()

    # A bad row in the middle ends the pack; where it was, it goes on.
    rows: list[dict[str, object]] = [*ROWS * 20, {"prompt": 7, "response": "a"}, *ROWS * 10]
    write(tmp_path / "b.jsonl", rows)
    with pytest.raises(DataError, match=r"b.jsonl:161: .*prompt must be"):
        packed(tmp_path / "b.jsonl", tmp_path / "3.tokens", chat)
    assert (tmp_path / "3.tokens.records").stat().st_size > 0
    resumed = packed(
        tmp_path / "b.jsonl", tmp_path / "3.tokens", chat, resume=True, on_bad_row="skip"
    )
    again = packed(tmp_path / "b.jsonl", tmp_path / "4.tokens", chat, on_bad_row="skip")
    assert resumed.path.read_bytes() == again.path.read_bytes()
    assert resumed.origin.bad_rows == 1
    assert documents(resumed) == documents(straight)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl"] * 2 + [".tokens"] * 4


def test_every_command_keeps_what_is_learned(tmp_path: Path, chat: ChatFormat) -> None:
    rows = [{"prompt": f"Say {n % 40}?", "response": "yes" * (n % 7) + "."} for n in range(200)]
    file = packed(write(tmp_path / "a.jsonl.gz", rows), tmp_path / "a.tokens", chat)
    a, whole = str(file.path), documents(file)

    main(["shuffle", a, "--seed", "3", "--out", f"{tmp_path}/s.tokens"])
    main(["merge", a, f"{tmp_path}/s.tokens", "--out", f"{tmp_path}/m.tokens"])
    main(["chunk", a, "--parts", "3", "--out", f"{tmp_path}/p.tokens"])
    main(["chunk", a, "--shares", "1,1", "--out", f"{tmp_path}/q.tokens"])

    shuffled = documents(TokenFile(tmp_path / "s.tokens"))
    assert shuffled != whole
    assert sorted(shuffled) == sorted(whole)
    assert documents(TokenFile(tmp_path / "m.tokens")) == whole + shuffled
    parts = [documents(TokenFile(path)) for path in sorted(tmp_path.glob("p-*"))]
    assert [each for part in parts for each in part] == whole
    shares = [documents(TokenFile(path)) for path in sorted(tmp_path.glob("q-*"))]
    prompts = [{record[0] for _, _, record in share} for share in shares]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0]) + len(prompts[1]) == 40


def test_every_flipped_bit_of_the_marks_is_found(
    tmp_path: Path, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (layouts, readers, writers):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    file = packed(write(tmp_path / "a.jsonl", ROWS), tmp_path / "a.tokens", chat)
    layout, whole = file.layout, file.path.read_bytes()
    assert layout.crcs_begin - layout.records_begin == 7 * 24 + -(-layout.tokens // 8)

    for position in range(layout.records_begin, layout.crcs_begin):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        file.path.write_bytes(changed)
        assert f"block {(position - 4096) // 64} " in "".join(findings(TokenFile(file.path)))
        with pytest.raises(DataError, match="differs from its CRC-32"):
            documents_unchecked(TokenFile(file.path))


def documents_unchecked(file: TokenFile) -> None:
    file.records(0, file.documents)
    file.trained(0, file.layout.tokens)


def test_a_first_token_that_is_learned_is_named(tmp_path: Path, chat: ChatFormat) -> None:
    file = packed(write(tmp_path / "a.jsonl", ROWS), tmp_path / "a.tokens", chat)
    layout, records = file.layout, file.records(0, file.documents)
    trained = file.trained(0, layout.tokens).copy()
    trained[file.span(2)[0]] = True
    lengths = np.diff(file.ends(0, file.documents).astype(np.int64), prepend=0)
    with writers.TokenWriter(tmp_path / "b.tokens", layout.width, marked=True) as writer:
        marks = Marks(trained, records)
        writer.append(file.slice(0, layout.tokens), lengths, marks)
        writer.finish(file.origin)

    (sentence,) = findings(TokenFile(tmp_path / "b.tokens"))
    assert "document 2 learns its first token" in sentence


def test_what_can_not_be_packed_or_joined_is_refused(
    tmp_path: Path, chat: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write(tmp_path / "a.jsonl", ROWS)
    dialogues = packed(rows, tmp_path / "a.tokens", chat)
    other = packed(rows, tmp_path / "o.tokens", chat, train_on="all")
    origin = dialogues.origin
    write_tokens(tmp_path / "t.tokens", [[1, EOS]], replace(origin, rendering=None))
    out, pack_a = ["--out", f"{tmp_path}/x.tokens"], ["pack", "a", "--tokenizer", "b"]

    for error, words, sentence in (
        (DataError, ["merge", str(other.path), str(dialogues.path)], "in another form than"),
        (DataError, ["merge", str(other.path), f"{tmp_path}/t.tokens"], "holds dialogues, and"),
        (DataError, ["convert", str(other.path), "--to", "megatron"], "has no place for which"),
        (ConfigError, [*pack_a, "--history", "user"], "history is of dialogues: give --rows"),
        (ConfigError, [*pack_a, "--rows", "dialogues", "--field", "x"], "field is of texts"),
    ):
        with pytest.raises(error, match=sentence):
            main([*words, *out])
    (tmp_path / "a.txt").write_text("a text")
    with pytest.raises(DataError, match="is one text, and dialogues are rows"):
        find_sources([f"{tmp_path}/a.txt"], rows_alone=True)
    ratings = [{**ROWS[0], "kind": "undo", "schema": 1, "supersedes": "r1"}]
    with pytest.raises(ConfigError, match="ratings that take earlier ones back"):
        packed(write(tmp_path / "r.jsonl", ratings), tmp_path / "r.tokens", chat)
    bad = [{"prompt": "\ud800", "response": "a"}]
    with pytest.raises(DataError, match="half a surrogate pair"):
        packed(write(tmp_path / "h.jsonl", bad), tmp_path / "h.tokens", chat)
    with pytest.raises(DataError, match="has a dialogue or a prompt"):
        packed(write(tmp_path / "e.jsonl", [ROWS[5]]), tmp_path / "e.tokens", chat)
    main(["show", str(dialogues.path)])
    assert "format human_assistant" in capsys.readouterr().out


def test_show_has_what_is_learned_in_brackets(
    tmp_path: Path, chat: ChatFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.tokenizer.save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text('{"model_type": "llama"}')
    rows = write(tmp_path / "a.jsonl", ROWS)
    words = ["pack", str(rows), "--tokenizer", f"{tmp_path}/b", "--rows", "dialogues"]
    main([*words, "--out", f"{tmp_path}/a.tokens"])

    main(["show", f"{tmp_path}/a.tokens", "--document", "1"])

    shown = capsys.readouterr().out
    assert "Assistant: 1<|endoftext|>\n\nHuman: Two?\n\nAssistant:[[ It is 2.<|end" in shown
    assert TokenFile(tmp_path / "a.tokens").origin.rendering is not None
    assert DataConfig(path=("a.tokens:2",)).is_packed
