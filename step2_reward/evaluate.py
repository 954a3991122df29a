"""Evaluation of step 2 on held-out rows."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.cli import run_main
from pipeline.command import joined, read_command
from pipeline.config import DataConfig
from pipeline.data.batches import collate_part, local_micro_batches
from pipeline.data.examples import Encoded
from pipeline.errors import DataError, require
from pipeline.installation import MODULE
from pipeline.models.forward import LabelOutputs, Scorer
from pipeline.models.trained import evaluating
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step2_reward.config import RewardConfig

if TYPE_CHECKING:
    from pipeline.data.chat.chat_format import ChatFormat
    from pipeline.data.examples import Example


def outputs_of(scorer: Scorer, sequences: Sequence[Encoded], *, max_tokens: int) -> LabelOutputs:
    """The outputs at the end of each sequence, on the CPU of every process, which all call it.

    Args:
        scorer: the model.
        sequences: the same on all processes.
        max_tokens: of a micro-batch.
    """
    data = current_mesh().data
    own = data.share(range(len(sequences)))
    found: list[tuple[int, list[float]]] = []
    cutpoints: Tensor | None = None
    with evaluating(scorer):
        lengths = [len(sequences[place]) for place in own]
        for part in local_micro_batches(lengths, max_tokens=max_tokens):
            rows = [sequences[own[place]] for place in part]
            batch = collate_part(rows, spare=sequences[0]).to(local_device())
            outputs = scorer.final_outputs(batch)
            logits = outputs.logits[: len(part)].tolist()
            found += zip((own[place] for place in part), logits, strict=True)
            cutpoints = outputs.cutpoints
    by_place = dict(pair for of_process in data.gather_objects(found) for pair in of_process)
    logits = torch.tensor([by_place[place] for place in range(len(sequences))])
    return LabelOutputs(logits, None if cutpoints is None else cutpoints.float().cpu())


def scores_of(outputs: LabelOutputs, values: Sequence[float]) -> Float[Tensor, " S"] | None:
    """The score of each sequence; None where several classes have no values."""
    if outputs.logits.shape[1] == 1:
        return outputs.logits.squeeze(1)
    return outputs.logits.softmax(dim=1) @ torch.tensor(values) if values else None


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
"""Prompts with a better and a worse answer."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Which reward model scores what."""

    path: str = ""
    """Reward model, such as OUT/step2_reward, or Hub id."""

    data_path: str | None = None
    """Pairs: a file, directory or Hub name, as in training."""

    pairs: int = 1000
    """Pairs to score, at most."""

    prompt: str | None = None
    """Prompt of single answers."""

    answer: tuple[str, ...] = ()
    """Answers to `prompt`."""

    max_length: int = 512
    """Longest prompt and answer, in tokens; a longer one loses its beginning."""

    def __post_init__(self) -> None:
        require(bool(self.path), "--path is missing: give a reward model, as OUT/step2_reward")
        require(self.pairs > 0, f"--pairs must be above 0, got {self.pairs}")
        require(
            (self.prompt is None) == (not self.answer),
            "--prompt and --answer belong together: give a prompt and one or more answers",
        )
        require(
            self.prompt is None or self.data_path is None,
            "--prompt and --data-path exclude each other: score single answers or pairs",
        )


def main(argv: Sequence[str]) -> None:
    """Score what was asked for: pairs of a data set, single answers, or the default examples.

    Raises:
        UserError: a wrong setting, no reward model at the path, no pairs in the data.
    """
    options = read_command(
        EvaluateConfig,
        argv,
        usage=(
            f"{MODULE} step2_reward.evaluate --path DIR [--data-path FILE]",
            f"{MODULE} step2_reward.evaluate --path DIR --prompt TEXT --answer TEXT [TEXT ...]",
        ),
        about="Scores of pairs or of single answers; without either, of three examples.",
        aliases={"model_name_or_path": "path"},  # DeepSpeed-Chat's
        gather=joined("answer"),
    )
    config = RewardConfig(data=DataConfig(max_length=options.max_length))

    from pipeline.logs import configure_logging
    from pipeline.models.reward_model import load_scorer

    configure_logging(is_main=True)
    scorer, chat = load_scorer(options.path)
    if options.data_path is not None:
        examples = read_pairs(options.data_path, seed=config.seed)[: options.pairs]
        lines = describe_pairs(scorer, chat, examples, config)
    elif options.prompt is not None:
        lines = describe_answers(scorer, chat, options.prompt, options.answer, config)
    else:
        lines = [
            line
            for prompt, better, worse in DEFAULT_EXAMPLES
            for line in describe_answers(scorer, chat, prompt, (better, worse), config)
        ]
    sys.stdout.write("\n".join(lines) + "\n")


def read_pairs(data_path: str, *, seed: int) -> "list[Example]":
    """The pairs behind a data path, of its test split where it has one.

    Raises:
        DataError: there is nothing there, or no row has a chosen and a rejected response.
    """
    from pipeline.config import EMBEDDED
    from pipeline.data.rows.named import named_set
    from pipeline.data.rows.shapes import read_row
    from pipeline.data.rows.sources import read_source
    from pipeline.data.sharing.steps import load_examples

    if data_path == EMBEDDED:
        return load_examples(DataConfig(), step=2, seed=seed).eval
    source = read_source(data_path, step=2)
    known = named_set(source.name)
    rows = source.eval or source.train
    examples = [known.read(row) if known else read_row(row, {}) for row in rows]
    pairs = [example for example in examples if example and example.chosen and example.rejected]
    if not pairs:
        raise DataError(
            f"--data-path {data_path}: none of its {len(rows)} rows has a chosen and a rejected"
            " response"
        )
    return pairs


def describe_pairs(
    scorer: "Scorer", chat: "ChatFormat", examples: "Sequence[Example]", config: RewardConfig
) -> list[str]:
    """Accuracy and mean scores over the pairs."""
    from step2_reward.objectives import evaluate
    from step2_reward.rows import encode

    figures = evaluate(scorer, encode(examples, chat, config), config)
    return [
        f"pairs          {len(examples)}",
        f"accuracy       {100 * figures['accuracy']:.1f} %",
        f"mean chosen    {figures['mean_chosen']:+.4f}",
        f"mean rejected  {figures['mean_rejected']:+.4f}",
    ]


def describe_answers(
    scorer: "Scorer", chat: "ChatFormat", prompt: str, answers: Sequence[str], config: RewardConfig
) -> list[str]:
    """The prompt, and each answer with its score."""
    from inference.streaming import printable

    scores = score_answers(scorer, chat, prompt, answers, config)
    return [
        printable(f"Prompt: {prompt}"),
        *(
            f"{score:+9.4f}  {printable(answer)}"
            for score, answer in zip(scores, answers, strict=True)
        ),
    ]


def score_answers(
    scorer: "Scorer", chat: "ChatFormat", prompt: str, answers: Sequence[str], config: RewardConfig
) -> list[float]:
    """The reward model's score of each answer to `prompt`."""
    import torch

    from pipeline.data.batches import collate
    from pipeline.data.examples import Message
    from pipeline.parallel.device import local_device

    rows = [
        chat.encode((Message("user", prompt),), (Message("assistant", answer),)).tail(
            config.data.max_length, keep_first=chat.begins_with_cls
        )
        for answer in answers
    ]
    with torch.no_grad():
        return scorer.final_scores(collate(rows).to(local_device())).tolist()


if __name__ == "__main__":
    run_main(main)
