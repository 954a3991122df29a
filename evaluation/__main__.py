"""Evaluate a model on tasks: `python -m evaluation --path DIR --tasks embedded gsm8k`.

Prints a table and writes the results and settings to evaluation.json.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from evaluation.config import EvaluationConfig
from evaluation.contract import Question, Task
from evaluation.tasks import tasks_named
from pipeline.cli.options import read_command, run_main, say
from pipeline.files.durable import check_output, write_output
from pipeline.report.results import find_model
from pipeline.system.installation import MODULE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.evaluate import Chat
    from evaluation.figures import Figure


def main(argv: Sequence[str]) -> None:
    """Evaluate the model, print a table and write the file.

    Raises:
        UserError: an unknown task or setting, no model at the path, rows that a task can't read.
    """
    config = read_command(
        EvaluationConfig,
        argv,
        usage=f"{MODULE} evaluation --path DIR --tasks TASK ... [--SETTING VALUE ...]",
        about="How well a model does on tasks that programs check: docs/evaluation.md.",
    )
    check_output(config.output, option="--output")
    tasks = tasks_named(config.tasks, config.paths, setting="--data")
    # All rows are read before the model, which takes longer.
    questions = {task.name: task.read(config.reading(task)) for task in tasks}

    from evaluation.evaluate import Chat
    from evaluation.figures import as_table, document
    from inference.replica import weights_hash
    from pipeline.data.chat.resolve_format import resolve_format
    from pipeline.models.forward.forward import context_length
    from pipeline.models.hf.chat import check_ready
    from pipeline.models.hf.load import load_for_inference
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    config = replace(config, path=find_model(config.path, config.method))
    check_ready(config.path)
    model, tokenizer = load_for_inference(config.path)
    chat = Chat(tokenizer, resolve_format(tokenizer, "auto"))
    for task in tasks:  # questions that are too long are reported before any is answered
        chat.encode(questions[task.name], task=task.name, context=context_length(model))
    figures = [
        figure
        for task in tasks
        for figure in _figures(task, questions[task.name], model, chat, config)
    ]
    say("\n".join(as_table(figures)))
    text = json.dumps(document(figures, config, weights_hash=weights_hash(model)), indent=2)
    write_output({config.output: f"{text}\n"}, option="--output")
    say(f"\nWith all settings in {config.output}")


def _figures(
    task: Task,
    questions: Sequence[Question],
    model: "PreTrainedModel",
    chat: "Chat",
    config: EvaluationConfig,
) -> "list[Figure]":
    from evaluation.evaluate import evaluate
    from inference.settings import Sampling

    sampling = Sampling(
        max_new_tokens=config.max_new_tokens or task.max_new_tokens,
        temperature=config.sampling_temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    return evaluate(
        task,
        questions,
        model,
        chat,
        sampling,
        ks=sorted(set(config.k)),
        num_samples=config.num_samples,
        batch_size=config.batch_size,
    )


if __name__ == "__main__":
    run_main(main)
