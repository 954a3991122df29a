"""Compare the responses of two models to the same prompts.

python -m step1_sft.evaluate --baseline facebook/opt-1.3b --model OUT/step1_sft
python -m step1_sft.evaluate --baseline DIR --model DIR --prompts IN.jsonl --out comparison.json
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from inference.settings import Sampling
from pipeline.cli.options import parse_command, run_main
from pipeline.files.durable import check_writable, write_output
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

if TYPE_CHECKING:
    from inference.responses import Prompt

DEFAULT_PROMPTS = (
    "Tell me about the city of Lisbon in a few sentences.",
    "Explain to a six-year-old why the sky is blue.",
    "Write a short poem about a patient frog.",
    "Who was Marie Curie, and what is she known for?",
    "Why is it good to sleep enough? Give three reasons.",
    "How do birds find their way when they fly south in winter?",
)
ROLES = ("baseline", "model")
ALIASES = {"model_name_or_path_baseline": "baseline", "model_name_or_path_finetune": "model"}
"""DeepSpeed-Chat's names for the two models."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Models and prompts of a comparison."""

    baseline: str = ""
    """Model before training: a directory or Hub id."""

    model: str = ""
    """Model after training."""

    prompts: Path | None = None
    """File of prompts, in the format of inference.generate; null uses six built-in ones."""

    max_new_tokens: int = 100
    """Maximum tokens per response."""

    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""

    seed: int = 0
    """Seed of sampling: the same seed draws the same responses."""

    out: Path | None = None
    """JSON file for the comparison; if null, it is only printed."""

    def __post_init__(self) -> None:
        require(bool(self.baseline), "--baseline is missing: set it to the initial model")
        require(bool(self.model), "--model is missing: set it to the trained model")


def main(argv: Sequence[str]) -> None:
    """Print the responses of both models, and write `--out`.

    Raises:
        UserError: a setting is wrong, a path contains no model, or a line is not a prompt.
    """
    config = parse_command(
        CompareConfig,
        argv,
        usage=f"{MODULE} step1_sft.evaluate --baseline DIR --model DIR [--SETTING VALUE ...]",
        about="Compare the responses of two models to the same prompts.",
        aliases=ALIASES,
    )
    if config.out is not None:
        check_writable(config.out, option="--out")
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
    )

    from inference.responses import Prompt, read_prompts
    from inference.text import printable
    from pipeline.data.examples import Message
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    if config.prompts is not None:
        prompts = read_prompts(config.prompts)
    else:
        prompts = [
            Prompt(text, (Message("user", text),), text, f"default prompt {number}")
            for number, text in enumerate(DEFAULT_PROMPTS, start=1)
        ]
    responses = {
        role: generate_responses(path, prompts, sampling)
        for role, path in zip(ROLES, (config.baseline, config.model), strict=True)
    }
    blocks = [
        "\n".join(
            [
                f"Prompt:   {prompt.messages[-1].content}",
                *(f"{role.capitalize() + ':':10}{responses[role][row]}" for role in ROLES),
            ]
        )
        for row, prompt in enumerate(prompts)
    ]
    sys.stdout.write(printable("\n\n".join(blocks) + "\n"))
    if config.out is not None:
        comparison = {
            "paths": {"baseline": config.baseline, "model": config.model},
            "rows": [
                {"prompt": prompt.value, **{role: responses[role][row] for role in ROLES}}
                for row, prompt in enumerate(prompts)
            ],
        }
        content = json.dumps(comparison, ensure_ascii=False, indent=2) + "\n"
        write_output({config.out: content}, option="--out")


def generate_responses(path: str, prompts: "Sequence[Prompt]", sampling: Sampling) -> list[str]:
    """Return the response of the model at `path` to each prompt."""
    from inference.responses import Responder
    from pipeline.models.hf.load import load_for_inference

    responder = Responder(*load_for_inference(path), sampling)
    encoded = [responder.encode(prompt) for prompt in prompts]
    return [row[0].text for row in responder.responses(encoded, first_row=0, batch_size=32)]


if __name__ == "__main__":
    run_main(main)
