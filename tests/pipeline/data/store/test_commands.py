"""The commands as a user types them."""

import json
from pathlib import Path

import pytest

from pipeline.data.store.__main__ import main
from pipeline.data.store.reader import TokenFile
from pipeline.errors import ConfigError, DataError
from tests.pipeline.data.tokenizers import KINDS

TEXTS = ["Hello you!", "<|endoftext|> written by a user", "How are you?\n\nFine, so.", ""]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    save_tokenizer("byte level with bos", tmp_path / "tokenizer")
    rows = [json.dumps({"body": text}) + "\n" for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(rows[:3]))
    (tmp_path / "b.jsonl").write_text("".join(rows[3:]))
    return tmp_path


def save_tokenizer(kind: str, directory: Path) -> None:
    KINDS[kind]().save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "llama"}')


def pack(corpus: Path) -> Path:
    options = ["--field", "body", "--tokenizer", f"{corpus}/tokenizer", "--out", f"{corpus}/c"]
    main(["pack", f"{corpus}/*.jsonl", *options])
    return corpus / "c"


@pytest.mark.jobs
def test_packed_documents_are_what_the_tokenizer_makes_of_the_texts(corpus: Path) -> None:
    tokenizer = KINDS["byte level with bos"]()
    file = TokenFile(pack(corpus))

    assert file.documents == len(TEXTS)
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert file.tokens(number).tolist() == [*ids, tokenizer.eos_token_id]
    assert file.origin.vocabulary == len(tokenizer)


@pytest.mark.jobs
def test_show_and_verify_print_what_is_there(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pack(corpus)
    ids = TokenFile(path).tokens(1).tolist()
    assert f"{path} has 4 documents, " in capsys.readouterr().out

    main(["show", str(path), "--document", "1"])
    text = capsys.readouterr().out
    assert text == f"document 1, {len(ids)} tokens\n{TEXTS[1]}\n{' '.join(map(str, ids))}\n"
    main(["show", str(path)])
    text = capsys.readouterr().out
    assert "4 documents" in text
    assert "a.jsonl, b.jsonl" in text
    assert "field body" in text
    main(["verify", str(path)])
    assert f"{path} is whole: 4 documents, " in capsys.readouterr().out


@pytest.mark.jobs
def test_verify_exits_with_2_and_names_the_block(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pack(corpus)
    content = bytearray(path.read_bytes())
    content[4100] ^= 4
    path.write_bytes(content)

    with pytest.raises(SystemExit) as ended:
        main(["verify", str(path)])

    assert ended.value.code == 2
    assert f"{path}: block 0 (bytes 4,096 to " in capsys.readouterr().out


@pytest.mark.jobs
def test_wrong_commands_are_refused_in_a_sentence(corpus: Path) -> None:
    path = str(pack(corpus))
    save_tokenizer("metaspace always", corpus / "other")

    with pytest.raises(DataError, match=r"is not the one that .* was packed with"):
        main(["show", path, "--document", "0", "--tokenizer", f"{corpus}/other"])
    with pytest.raises(ConfigError, match="has the documents 0 to 3"):
        main(["show", path, "--document", "4"])
    with pytest.raises(ConfigError, match="a file is missing"):
        main(["pack", "--tokenizer", "x", "--out", f"{corpus}/d"])
    with pytest.raises(ConfigError, match="--out is missing"):
        main(["pack", "a.jsonl", "--tokenizer", "x"])
    with pytest.raises(ConfigError, match="no command 'pakc'; did you mean pack"):
        main(["pakc"])
