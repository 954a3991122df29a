"""DPO and robust DPO where a share of the pairs have the worse response as the chosen one.

    python -m benchmarks.flipped_labels --out DIR [--seeds 1234 2 3] [--share 0.2]

The pairs are those of the embedded task about the prompts of steps 2 and 3, of which a share,
drawn at random, have their sides exchanged; held-out pairs are as they are. Step 1 of the embedded
default runs once for each seed, then both methods from its model. Robust DPO is given the share
(`label_smoothing`). What DIR already holds is kept, so that a command that was cut off goes on
where it stopped. The table has the share of sampled responses to 256 held-out prompts that are
correct and polite.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from pipeline.data.embedded import pair_examples
from pipeline.data.examples import Example

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("dpo", "rdpo")


def rows(pairs: Iterable[Example], *, share: float, random: Random) -> list[dict[str, str]]:
    """The pairs as lines of a file, `share` of them with their sides exchanged."""
    found: list[dict[str, str]] = []
    for pair in pairs:
        assert pair.chosen is not None
        assert pair.rejected is not None
        sides = [pair.chosen[-1].content, pair.rejected[-1].content]
        if random.random() < share:
            sides.reverse()
        prompt = pair.prompt[-1].content
        found.append({"prompt": prompt, "chosen": sides[0], "rejected": sides[1]})
    return found


def write(path: Path, lines: list[dict[str, str]]) -> None:
    """Write the rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def train(directory: Path, seed: int, *words: str) -> None:
    """Run train.py, its log beside the directory; steps that are done are skipped."""
    command = [sys.executable, "train.py", "--seed", str(seed), "--output-dir", str(directory)]
    with directory.with_name(f"{directory.name}.log").open("a") as log:
        subprocess.run([*command, *words, "--resume"], cwd=ROOT, stdout=log, stderr=log, check=True)


def run(out: Path, seed: int, share: float) -> Path:
    """The directory of a seed's run, with what was missing made."""
    directory, pairs, held_out = out / f"seed{seed}", out / f"pairs{seed}.jsonl", out / "eval.jsonl"
    train_pairs, eval_pairs = pair_examples(of_steps=(2, 3), seed=seed)
    write(pairs, rows(train_pairs, share=share, random=Random(f"flips, seed {seed}")))
    write(held_out, rows(eval_pairs, share=0.0, random=Random("none")))
    train(directory, seed, "--step", "1")
    data = ["--preference.data.path", str(pairs), "--preference.data.eval_path", str(held_out)]
    noise = ["--methods.rdpo.label_smoothing", str(share)]
    train(directory, seed, "--step", "3", "--method", *METHODS, *data, *noise)
    return directory


def figures(directory: Path) -> list[str]:
    """Of step 1's model and of each method's: the judge's rate; then held-out pairs in order."""
    steps = json.loads((directory / "summary.json").read_text())["steps"]
    ends = [steps[f"step3_{method}"]["eval"] for method in METHODS]
    rates = [ends[0]["judge"]["step1_sft"]]
    rates += [end["judge"][f"step3_{name}"] for name, end in zip(METHODS, ends, strict=True)]
    return [f"{100 * rate:.1f} %" for rate in (*rates, *(end["accuracy_after"] for end in ends))]


def main(argv: Sequence[str]) -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the runs go, and stay")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 2, 3])
    parser.add_argument("--share", type=float, default=0.2)
    args = parser.parse_args(argv)
    print("| seed | step 1 | dpo | rdpo | dpo, pairs in order | rdpo |")
    print("|---|---|---|---|---|---|")
    for seed in args.seeds:
        cells = figures(run(args.out.resolve(), seed, args.share))
        print("| " + " | ".join([str(seed), *cells]) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
