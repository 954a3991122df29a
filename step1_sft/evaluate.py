"""Two models answer the same prompts, side by side.

python -m step1_sft.evaluate --baseline facebook/opt-1.3b --model OUT/step1_sft
python -m step1_sft.evaluate --baseline DIR --model DIR --prompts IN.jsonl --out comparison.html
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inference.settings import Sampling
from pipeline.cli import run_main
from pipeline.errors import ConfigError
from pipeline.installation import MODULE

if TYPE_CHECKING:
    from inference.files.prompts import Prompt

DEFAULT_PROMPTS = (
    "Tell me about the city of Lisbon in a few sentences.",
    "Explain to a six-year-old why the sky is blue.",
    "Write a short poem about a patient frog.",
    "Who was Marie Curie, and what is she known for?",
    "Why is it good to sleep enough? Give three reasons.",
    "How do birds find their way when they fly south in winter?",
)
ROLES = ("baseline", "model")


def main(argv: Sequence[str]) -> None:
    """Let both models answer, print their answers, and write `--out`.

    Raises:
        UserError: a wrong setting, no model at a path, a line that is not a prompt.
    """
    options = parse(argv)
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, seed=options.seed
    )
    if options.out is not None and options.out.suffix not in {".html", ".json"}:
        raise ConfigError(f"--out {options.out}: the name must end in .html or .json")

    from inference.files.prompts import Prompt, read_prompts
    from pipeline.data.examples import Message
    from pipeline.logs import configure_logging

    configure_logging(is_main=True)
    if options.prompts is not None:
        prompts = read_prompts(options.prompts)
    else:
        prompts = [
            Prompt(text, (Message("user", text),), text, f"default prompt {number}")
            for number, text in enumerate(DEFAULT_PROMPTS, start=1)
        ]
    answers = {
        role: answer(path, prompts, sampling)
        for role, path in zip(ROLES, (options.baseline, options.model), strict=True)
    }
    sys.stdout.write(as_text(prompts, answers))
    if options.out is not None:
        paths = {"baseline": options.baseline, "model": options.model}
        write(options.out, prompts, answers, paths=paths)


def answer(path: str, prompts: "Sequence[Prompt]", sampling: Sampling) -> list[str]:
    """What the model at `path` answers to each prompt."""
    from inference.files.responses import Responder
    from pipeline.models.load import load_for_inference

    responder = Responder(*load_for_inference(path), sampling)
    encoded = [responder.encode(prompt) for prompt in prompts]
    return [row[0].text for row in responder.responses(encoded, first_row=0, batch_size=32)]


def as_text(prompts: "Sequence[Prompt]", answers: Mapping[str, Sequence[str]]) -> str:
    """The comparison for a terminal."""
    from inference.streaming import printable

    blocks = [
        "\n".join(
            [
                f"Prompt:   {prompt.messages[-1].content}",
                *(f"{role.capitalize() + ':':10}{answers[role][row]}" for role in ROLES),
            ]
        )
        for row, prompt in enumerate(prompts)
    ]
    return printable("\n\n".join(blocks) + "\n")


def write(
    path: Path,
    prompts: "Sequence[Prompt]",
    answers: Mapping[str, Sequence[str]],
    *,
    paths: Mapping[str, str],
) -> None:
    """Write the comparison as .html or .json.

    Raises:
        ConfigError: the file can't be written.
    """
    from pipeline.report.pages import render_comparison

    if path.suffix == ".json":
        rows = [
            {"prompt": prompt.given, **{role: answers[role][row] for role in ROLES}}
            for row, prompt in enumerate(prompts)
        ]
        content = json.dumps({"paths": paths, "rows": rows}, ensure_ascii=False, indent=2) + "\n"
    else:
        dialogues = [
            [(message.role, message.content) for message in prompt.messages] for prompt in prompts
        ]
        content = render_comparison(dialogues, answers, titles=paths)
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} can't be written: {error.strerror}") from error


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; DeepSpeed-Chat's names for the two models work too."""
    parser = argparse.ArgumentParser(
        prog=f"{MODULE} step1_sft.evaluate",
        description="Two models answer the same prompts, side by side.",
    )
    add = parser.add_argument
    add(
        "--baseline",
        "--model_name_or_path_baseline",
        required=True,
        metavar="DIR",
        help="model before training: a directory or Hub id",
    )
    add(
        "--model",
        "--model_name_or_path_finetune",
        required=True,
        metavar="DIR",
        help="model after training",
    )
    add("--prompts", type=Path, metavar="IN.jsonl", help="as inference.generate; default: six")
    add("--max-new-tokens", "--max_new_tokens", type=int, default=100, metavar="N")
    add("--temperature", type=float, default=0.0, metavar="X", help="0, the default, is greedy")
    add("--seed", type=int, default=0)
    add("--out", type=Path, metavar="FILE", help="write the comparison as .html or .json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_main(main)
