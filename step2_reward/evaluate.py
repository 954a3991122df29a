"""Score single responses with a reward model, with output like DeepSpeed-Chat's rw_eval.py."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.cli.options import parse_command, run_main
from pipeline.system.errors import require
from pipeline.system.installation import MODULE

DEFAULT_EXAMPLES = (
    (
        "Tell me about the planet Mars in one sentence.",
        "Mars is the fourth planet from the Sun, a cold desert world that looks red because its"
        " dust is full of rust.",
        "Mars mars mars is planet the the and it is the.",
    ),
    (
        "How do I boil an egg?",
        "Lower it into boiling water, wait seven to ten minutes, then cool it under cold water.",
        "I don't care about your egg.",
    ),
    (
        "What is the capital of Japan?",
        "The capital of Japan is Tokyo.",
        "The capital of Japan is a good question, the capital is Paris.",
    ),
)
"""Prompts with a better and a worse response."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """A reward model, and the responses to score."""

    path: str = ""
    """Reward model: a directory, such as OUT/step2_reward, or a Hub id."""

    prompt: str | None = None
    """Prompt of the responses; null scores three examples."""

    answer: tuple[str, ...] = ()
    """Responses to `prompt`."""

    def __post_init__(self) -> None:
        require(bool(self.path), "--path is missing: pass a reward model, such as OUT/step2_reward")
        require(
            (self.prompt is None) == (not self.answer),
            "--prompt and --answer must be used together: pass a prompt and one or more answers",
        )


def main(argv: Sequence[str]) -> None:
    """Print each prompt, and its responses with their scores.

    Raises:
        UserError: a setting is wrong, or the path contains no reward model.
    """
    options = parse_command(
        EvaluateConfig,
        argv,
        usage=f"{MODULE} step2_reward.evaluate --path DIR [--prompt TEXT --answer TEXT [TEXT ...]]",
        about="Score responses, by default three examples; to score a file, use step2_reward.lab.",
        aliases={"model_name_or_path": "path"},  # DeepSpeed-Chat's name
    )
    from inference.reward_model import score_responses
    from inference.text import printable
    from pipeline.data.examples import Message
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    examples = DEFAULT_EXAMPLES
    if options.prompt is not None:
        examples = ((options.prompt, *options.answer),)
    dialogues = [
        ((Message("user", prompt),), response)
        for prompt, *responses in examples
        for response in responses
    ]
    scores = iter(score_responses(options.path, dialogues))
    for prompt, *responses in examples:
        lines = [printable(f"Prompt: {prompt}")]
        lines += [f"{next(scores):+9.4f}  {printable(response)}" for response in responses]
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_main(main)
