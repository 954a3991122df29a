"""Evaluate a model on tasks: `python -m evaluation --path DIR --tasks embedded gsm8k`.

Prints a table; writes the results and settings to evaluation.json, and the responses with their
grades to evaluation.jsonl.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evaluation.config import EvaluationConfig
from evaluation.contract import Grades, Question, Task
from evaluation.tasks import get_tasks
from pipeline.cli.options import parse_command, print_output, run_main
from pipeline.files.durable import check_writable, write_output
from pipeline.report.results import find_model
from pipeline.system.installation import MODULE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from evaluation.figures import TaskMetric
    from pipeline.data.chat.chat_format import ChatFormat


def main(argv: Sequence[str]) -> None:
    """Evaluate the model, print a table and write the files.

    Raises:
        UserError: a task or setting is unknown, the path contains no model, or rows can't be read.
    """
    config = parse_command(
        EvaluationConfig,
        argv,
        usage=f"{MODULE} evaluation --path DIR --tasks TASK ... [--SETTING VALUE ...]",
        about="Evaluate a model on tasks that programs grade (docs/evaluation.md).",
    )
    check_writable(config.output, option="--output")
    tasks = get_tasks(config.tasks, config.paths, setting="--data {}=PATH")
    # Read all rows before loading the model, which takes longer.
    questions = {task.name: task.read(config.read_options(task)) for task in tasks}

    from evaluation.evaluate import encode_questions, grade_responses
    from evaluation.figures import compute_metrics, format_table, make_document
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
    chat = resolve_format(tokenizer, "auto")
    for task in tasks:  # report questions that are too long before answering any
        context = context_length(model)
        encode_questions(questions[task.name], chat, task=task.name, context=context)
    metrics: list[TaskMetric] = []
    lines: list[str] = []
    for task in tasks:
        responses = _respond(task, questions[task.name], model, chat, config)
        grades = grade_responses(task, questions[task.name], responses)
        metrics += compute_metrics(task.name, grades, sorted(set(config.k)))
        rows = zip(questions[task.name], responses, grades, strict=True)
        lines += [json.dumps(_format_record(task, *row), ensure_ascii=False) + "\n" for row in rows]
    print_output("\n".join(format_table(metrics)))
    text = json.dumps(make_document(metrics, config, weights_hash=weights_hash(model)), indent=2)
    output = {config.output: f"{text}\n", config.responses_path: "".join(lines)}
    write_output(output, option="--output")
    print_output(f"\nsettings and metrics: {config.output}\nresponses: {config.responses_path}")


def _format_record(
    task: Task, question: Question, responses: Sequence[str], grades: Sequence[Grades]
) -> dict[str, Any]:
    """Return a line of the file of responses."""
    messages = [{"role": message.role, "content": message.content} for message in question.messages]
    return {"task": task.name, "prompt": messages, "responses": responses, "grades": grades}


def _respond(
    task: Task,
    questions: Sequence[Question],
    model: "PreTrainedModel",
    chat: "ChatFormat",
    config: EvaluationConfig,
) -> list[list[str]]:
    """Generate the responses to each question, and show the progress."""
    from evaluation.evaluate import generate_texts
    from inference.settings import Sampling
    from pipeline.system.logs import Progress

    sampling = Sampling(
        max_new_tokens=config.max_new_tokens or task.max_new_tokens,
        temperature=config.sampling_temperature,
        top_p=config.top_p,
        seed=config.seed,
    )
    progress = Progress(task.name, len(questions) * config.num_samples)
    progress.start()
    try:
        return generate_texts(
            questions,
            model,
            chat,
            sampling,
            task=task.name,
            num_samples=config.num_samples,
            batch_size=config.batch_size,
            progress=progress,
        )
    finally:
        progress.stop()


if __name__ == "__main__":
    run_main(main)
