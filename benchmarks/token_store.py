"""How fast a corpus becomes a token file: beside the tokenizer alone and `datasets.map`.

The corpus is that of benchmarks.system_texts, over and over to `--megabytes`, and the tokenizer a
byte-level BPE trained on it. Ways alternate; each number is a median over `--rounds`. Seconds of
processors, of all processes, hardly depend on what else a machine does; those of the clock do.

    tokenizers   `encode_batch_fast` of all texts in memory on two threads: the limit
    pack         `python -m pipeline.data.store pack --workers 2`, imports included
    datasets     `load_dataset` and `map(batched=True, num_proc=2)` to token ids, imports included

python -m benchmarks.token_store --megabytes 24 --rounds 3
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.system_texts import SHORTEST, documents

VOCABULARY = 32_000
THREADS = 2

ALONE = """
import json, sys, time
from tokenizers import Tokenizer
rows, path = sys.argv[1:]
texts = [json.loads(line)["text"] for line in open(rows, encoding="utf-8")]
tokenizer = Tokenizer.from_file(path + "/tokenizer.json")
began, used = time.perf_counter(), time.process_time()
for start in range(0, len(texts), 256):
    tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
print(time.perf_counter() - began, time.process_time() - used)
"""

DATASETS = """
import sys
import datasets
from transformers import AutoTokenizer
rows, path, cache = sys.argv[1:]
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(path)
eos = tokenizer.eos_token_id

def encode(batch):
    found = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)
    return {"input_ids": [[*ids, eos] for ids in found["input_ids"]]}

data = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=cache)
data.map(encode, batched=True, num_proc=2, remove_columns=["text"])
"""


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=24.0)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        size = write_corpus(directory, args.megabytes)
        ways = {"tokenizers": alone, "pack": pack, "datasets": mapped}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                seconds[name].append(way(directory))
        print(
            f"{size / 1e6:.1f} MB of JSON lines, {args.rounds} rounds, {THREADS} threads or workers"
        )
        print(f"{'':<11}{'clock, s':>10}{'of limit':>10}{'processors, s':>15}{'of limit':>10}")
        limits = medians(seconds["tokenizers"])
        for name, each in seconds.items():
            clock, used = medians(each)
            shares = limits[0] / clock, limits[1] / used
            print(f"{name:<11}{clock:>10.2f}{shares[0]:>10.2f}{used:>15.2f}{shares[1]:>10.2f}")


def medians(seconds: list[tuple[float, float]]) -> tuple[float, float]:
    """Of the clock's and of the processors'."""
    clock, used = zip(*seconds, strict=True)
    return statistics.median(clock), statistics.median(used)


def write_corpus(directory: Path, megabytes: float) -> int:
    """Rows and tokenizer; the rows' bytes."""
    texts = [text for text in documents() if len(text) >= SHORTEST]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    home = directory / "tokenizer"
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    special = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (home / "tokenizer_config.json").write_text(json.dumps(special))
    (home / "config.json").write_text('{"model_type": "llama"}')
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    times = max(1, round(megabytes * 1e6 / len(rows)))
    (directory / "rows.jsonl").write_text(rows * times)
    return len(rows) * times


def alone(directory: Path) -> tuple[float, float]:
    """Seconds of the tokenizer itself, measured in a process of its own."""
    words = [ALONE, str(directory / "rows.jsonl"), str(directory / "tokenizer")]
    threads = {"RAYON_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "true"}
    clock, used = run(["-c", *words], **threads).split()
    return float(clock), float(used)


def pack(directory: Path) -> tuple[float, float]:
    """Seconds of the command."""
    out = directory / "x.tokens"
    out.unlink(missing_ok=True)
    words = ["-m", "pipeline.data.store", "pack", str(directory / "rows.jsonl")]
    words += ["--tokenizer", str(directory / "tokenizer"), "--out", str(out)]
    return timed(lambda: run([*words, "--workers", str(THREADS)]))


def mapped(directory: Path) -> tuple[float, float]:
    """Seconds of a program that has the same tokens as rows of Arrow in the end."""
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        words = [DATASETS, str(directory / "rows.jsonl"), str(directory / "tokenizer"), cache]
        return timed(lambda: run(["-c", *words], TOKENIZERS_PARALLELISM="false", HF_HOME=cache))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of the processors in the processes that it starts."""
    began, before = time.perf_counter(), os.times()
    work()
    after = os.times()
    used = after.children_user + after.children_system
    return time.perf_counter() - began, used - before.children_user - before.children_system


def run(words: list[str], **environment: str) -> str:
    """What a program prints, in an environment with more variables."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


if __name__ == "__main__":
    main()
