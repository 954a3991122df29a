r"""The tasks, by name: GSM8K, IFEval, the embedded task and arithmetic.

GSM8K (Cobbe et al. 2021, arXiv:2110.14168) has grade-school word problems: `question`, and
`answer`, a solution that ends with a line such as `#### 18`. A response is graded in two ways,
because the choice often matters more than the training: `strict` takes the number that is marked
as the answer, by #### or \boxed, and `flexible` takes the last number of the text. Numbers are
compared exactly, as fractions.
"""

from collections.abc import Mapping, Sequence

from evaluation.contract import Grades, Question, ReadOptions, Task, get_column, read_task_rows
from evaluation.ifeval import IFEVAL
from pipeline.data.examples import Message
from pipeline.data.rows.shapes import read_row
from pipeline.data.rows.sources import Row
from pipeline.demo.arithmetic import HELD_OUT, ArithmeticConfig, make_sums
from pipeline.demo.task import held_out_questions, verdict
from pipeline.system.errors import ConfigError, DataError, require, suggestion
from rewards.math_answers import gold_answer, last_number, marked_answer, response_answer


def read_gsm8k(options: ReadOptions) -> list[Question]:
    """Read the problems from a data path, each preceded by the requested few-shot examples.

    Raises:
        DataError: a row lacks its question, or its answer has no number.
    """

    def make_turn(row: Row) -> Message:
        parts = [str(get_column(row, "question")), options.instruction]
        return Message("user", "\n\n".join(filter(None, parts)))

    assert options.path is not None
    rows, demonstration_rows = read_task_rows(options.path, options.limit, shots=options.shots)
    demonstrations = [
        turn
        for row in demonstration_rows
        for turn in (make_turn(row), Message("assistant", str(get_column(row, "answer"))))
    ]
    questions = []
    for row in rows:
        answer = str(get_column(row, "answer"))
        if gold_answer(answer) is None:
            raise DataError(
                f"{row.origin}: the answer must end with #### and a number, as GSM8K's answers do"
            )
        questions.append(Question((*demonstrations, make_turn(row)), {"answer": answer}))
    return questions


def grade_gsm8k(question: Question, response: str) -> Grades:
    """Return whether a response's marked number, and its last number, are correct."""
    gold = gold_answer(question.extra["answer"])
    return {
        "strict": (marked_answer(response) == gold,),
        "flexible": (last_number(response) == gold,),
    }


def read_embedded(options: ReadOptions) -> list[Question]:
    """Return the prompts whose wordings are not used for training, ordered by kind.

    Raises:
        ConfigError: a data path is given, which the embedded task doesn't use.
    """
    if options.path is not None:
        raise ConfigError(f"the task embedded has its own rows; omit {options.path}")
    questions = held_out_questions()
    if options.limit is not None and options.limit < len(questions):
        # Sample evenly: the set is ordered by kind.
        indices = [index * len(questions) // options.limit for index in range(options.limit)]
        questions = [questions[index] for index in indices]
    return [
        Question((Message("user", q.text),), {"kind": q.fact.kind, "answer": q.fact.answer})
        for q in questions
    ]


def grade_embedded(question: Question, response: str) -> Grades:
    """Return whether a response is the correct sentence, whether it is polite, and both."""
    result = verdict(question.extra["kind"], question.extra["answer"], response)
    return {"both": (result.both,), "correct": (result.correct,), "polite": (result.polite,)}


def read_arithmetic(options: ReadOptions) -> list[Question]:
    """Read the addition problems in a data path, or generate the default held-out ones.

    Raises:
        DataError: a row has no prompt, or its answer is not a number.
    """
    if options.path is not None:
        rows, _ = read_task_rows(options.path, options.limit)
    else:
        held_out = make_sums(ArithmeticConfig())[:HELD_OUT][: options.limit]
        rows = [Row(row, f"sum {number}") for number, row in enumerate(held_out, start=1)]
    questions = []
    for row in rows:
        example = read_row(row, {})
        answer = get_column(row, "answer", (str, int, float))
        if example is None or not example.prompt or gold_answer(answer) is None:
            raise DataError(f"{row.origin} must have a prompt and an answer that is a number")
        questions.append(Question(example.prompt, {"answer": answer}))
    return questions


def grade_arithmetic(question: Question, response: str) -> Grades:
    """Return whether the response's answer is the correct sum."""
    return {"correct": (response_answer(response) == gold_answer(question.extra["answer"]),)}


GSM8K = Task(
    "gsm8k", read_gsm8k, grade_gsm8k, max_new_tokens=512, needs_path=True, takes_shots=True
)
EMBEDDED = Task("embedded", read_embedded, grade_embedded, max_new_tokens=64)
ARITHMETIC = Task("arithmetic", read_arithmetic, grade_arithmetic, max_new_tokens=32)

TASKS = {task.name: task for task in (GSM8K, IFEVAL, EMBEDDED, ARITHMETIC)}


def get_tasks(names: Sequence[str], paths: Mapping[str, str], *, setting: str) -> list[Task]:
    """Return the tasks with these names.

    Args:
        names: names of tasks.
        paths: data paths, by the name of the task that reads them.
        setting: name, for error messages, of a task's path setting; {} stands for the task.

    Raises:
        ConfigError: a task is unknown, named twice, or lacks its data path, or a path has no task.
    """
    for name in (*names, *paths):
        if name not in TASKS:
            raise ConfigError(f"there is no task {name}; {suggestion(name, TASKS)}")
    for name in paths:
        option = setting.format(name)
        require(name in names, f"{option}: add {name} to the tasks, or omit this path")
    for name in names:
        require(names.count(name) == 1, f"the task {name} is listed twice; list it once")
        require(
            name in paths or not TASKS[name].needs_path,
            f"the task {name} has no built-in rows; pass a file or Hub name with"
            f" {setting.format(name)}",
        )
    return [TASKS[name] for name in names]


def parse_paths(values: Sequence[str], *, setting: str) -> dict[str, str]:
    """Return data paths by task, parsed from arguments such as `gsm8k=rows.jsonl`.

    Raises:
        ConfigError: an argument is not of the form TASK=PATH, or a task has two paths.
    """
    paths: dict[str, str] = {}
    for value in values:
        task, equals, path = value.partition("=")
        require(
            bool(task and equals and path),
            f"{setting} {value}: pass the task and its rows, such as gsm8k=rows.jsonl",
        )
        require(task not in paths, f"{setting} has two paths for {task}; omit one")
        paths[task] = path
    return paths
