"""Write rows for docs/recipes.md: `python scripts/recipe_rows.py {bullets,problems} DATA OUT`."""

import gzip
import json
import sys
from pathlib import Path


def bullets(data: Path) -> list[dict[str, str]]:
    """Return the first user turns of hh-rlhf, with an instruction."""
    with gzip.open(data / "harmless-base" / "test.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["chosen"].split("\n\nAssistant:")[0] for line in file]
    turns = [text.removeprefix("\n\nHuman:").strip() for text in dict.fromkeys(texts)]
    return [{"prompt": f"{text}\nAnswer with three bullet points."} for text in turns]


def problems(data: Path) -> list[dict[str, str]]:
    """Return the word problems of SVAMP, with their answers."""
    rows = json.loads((data / "SVAMP.json").read_text())
    texts = [f"{row['Body'].strip(' .')}. {row['Question']}\nAnswer with a number." for row in rows]
    answers = [f"{row['Answer']:g}" for row in rows]
    return [{"prompt": text, "answer": answer} for text, answer in zip(texts, answers, strict=True)]


if __name__ == "__main__":
    _, kind, data, out = sys.argv
    rows = {"bullets": bullets, "problems": problems}[kind](Path(data))
    Path(out).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
