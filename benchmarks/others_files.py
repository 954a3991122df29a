"""Are files read as the programs meant them that write them? Megatron's and Modalities'.

Each program's own code writes a corpus, and `pipeline.data.store convert` makes a token file of it:
every token of every document is compared with those that the tokenizer gives.

    --megatron DIR    a checkout of Megatron-LM: `IndexedDatasetBuilder` writes .bin and .idx in u16
                      and i32, each document as one sequence and as several
    --modalities DIR  a checkout of Modalities, whose `IndexGenerator` and `PackedDataGenerator`
                      write .idx and .pbin; it needs jq, sentencepiece and pydantic

python -m benchmarks.others_files --megatron DIR --modalities DIR
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.token_store import write_corpus
from pipeline.data.store.__main__ import main as store
from pipeline.data.store.check import findings
from pipeline.data.store.reader import TokenFile
from pipeline.errors import ConfigError

DOCUMENTS = 500

MEGATRON = """
import json, sys, types
from pathlib import Path

root, ids, out = sys.argv[1:]
# The packages without what their __init__ imports, which is all of Megatron-Core.
for name in ("megatron", "megatron.core", "megatron.core.datasets"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(Path(root, *name.split(".")))]
utils = sys.modules["megatron.core.utils"] = types.ModuleType("megatron.core.utils")
utils.log_single_rank = lambda *args, **kwargs: None
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

documents = json.loads(Path(ids).read_text())
for dtype in (numpy.uint16, numpy.int32):
    for pieces in (1, 3):
        name = f"{out}/{dtype.__name__}-{pieces}"
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=dtype)
        for document in documents:
            size = -(-len(document) // pieces)
            parts = [document[i : i + size] for i in range(0, len(document), size)]
            builder.add_document(torch.tensor(document), [len(part) for part in parts])
        builder.finalize(f"{name}.idx")
"""

MODALITIES = """
import sys
from pathlib import Path

from modalities.dataloader.create_index import IndexGenerator
from modalities.dataloader.create_packed_data import PackedDataGenerator
from modalities.tokenization.tokenizer_wrapper import PreTrainedHFTokenizer

rows, tokenizer, out = map(Path, sys.argv[1:])
IndexGenerator(rows).create_index(out / "rows.idx")
PackedDataGenerator(
    rows,
    tokenizer=PreTrainedHFTokenizer(str(tokenizer)),
    eod_token="<|end|>",
    number_of_processes=2,
    jq_pattern=".text",
    processing_batch_size=16,
    raw_samples_queue_size=8,
    processed_samples_queue_size=8,
    index_path=out / "rows.idx",
).run(out / "modalities.pbin")
"""


def main() -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--modalities", type=Path, help="a checkout of Modalities")
    args = parser.parse_args()
    if args.megatron is None and args.modalities is None:
        raise ConfigError("give --megatron DIR or --modalities DIR, a checkout of either program")
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        documents = written(home)
        if args.megatron is not None:
            run(MEGATRON, [args.megatron, home / "ids.json", home], path=args.megatron)
        if args.modalities is not None:
            words = [home / "rows.jsonl", home / "tokenizer", home]
            run(MODALITIES, words, path=args.modalities / "src")
        for source in (*sorted(home.glob("*-?.idx")), *home.glob("*.pbin")):
            check(source, home, documents)


def written(home: Path) -> list[list[int]]:
    """The corpus in `home`, and the tokens of each of its documents, eos included."""
    write_corpus(home, 0.0)
    rows = (home / "rows.jsonl").read_text().splitlines()[:DOCUMENTS]
    (home / "rows.jsonl").write_text("\n".join(rows) + "\n")
    tokenizer = Tokenizer.from_file(str(home / "tokenizer" / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|end|>")
    texts = [json.loads(row)["text"] for row in rows]
    documents = [[*tokenizer.encode(text).ids, eos] for text in texts]
    (home / "ids.json").write_text(json.dumps(documents))
    return documents


def check(source: Path, home: Path, documents: Sequence[Sequence[int]]) -> None:
    """Convert a file and compare each document.

    Raises:
        AssertionError: one differs.
    """
    out = home / f"{source.name}.tokens"
    store(["convert", str(source), "--tokenizer", str(home / "tokenizer"), "--out", str(out)])
    file = TokenFile(out)
    assert not list(findings(file))
    assert [file.tokens(number).tolist() for number in range(file.documents)] == documents
    tokens = sum(map(len, documents))
    sys.stdout.write(f"{source.name}: {len(documents):,} documents, {tokens:,} tokens are equal\n")


def run(program: str, words: Sequence[Path], *, path: Path) -> None:
    """A program of another package."""
    known = os.environ.get("PYTHONPATH", "")
    subprocess.run(
        [sys.executable, "-c", program, *map(str, words)],
        env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{known}", "HF_HUB_OFFLINE": "1"},
        check=True,
    )


if __name__ == "__main__":
    main()
