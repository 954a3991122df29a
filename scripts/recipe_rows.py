"""Write rows for docs/recipes.md: `python scripts/recipe_rows.py {bullets,problems} DATA OUT`."""

import gzip
import json
import sys
from pathlib import Path


def bullets(data: Path) -> list[dict[str, str]]:
    """Return the first user turn of each dialogue of hh-rlhf, with an instruction appended."""
    with gzip.open(data / "harmless-base" / "test.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["chosen"].split("\n\nAssistant:")[0] for line in file]
    turns = [text.removeprefix("\n\nHuman:").strip() for text in dict.fromkeys(texts)]
    return [{"prompt": f"{text}\nAnswer with three bullet points."} for text in turns]


def problems(data: Path) -> list[dict[str, str]]:
    """Return the word problems of SVAMP, with their calculations as responses, and answers."""
    rows = []
    for row in json.loads((data / "SVAMP.json").read_text()):
        calculation = row["Equation"].replace(".0 ", " ").removeprefix("( ").removesuffix(" )")
        answer = f"{row['Answer']:.12g}"
        prompt = f"{row['Body'].strip(' .')}. {row['Question']}\nWrite the calculation."
        rows.append({"prompt": prompt, "response": f"{calculation} = {answer}", "answer": answer})
    return rows


if __name__ == "__main__":
    _, kind, data, out = sys.argv
    rows = {"bullets": bullets, "problems": problems}[kind](Path(data))
    Path(out).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
