"""Settings of `python -m evaluation`, and of tasks that are evaluated during training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.contract import Question, ReadOptions, Task
from evaluation.tasks import get_tasks, parse_paths
from pipeline.system.errors import require


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Tasks evaluated in addition to a step's own evaluation."""

    eval_tasks: tuple[str, ...] = ()
    """Tasks (docs/evaluation.md) that evaluations include: gsm8k, embedded, ..."""

    eval_task_data: dict[str, str] = field(default_factory=dict)
    """Data paths of tasks, as {"gsm8k": "FILE_OR_NAME"}."""

    eval_task_rows: int = 256
    """Maximum number of questions per task."""

    eval_task_tokens: int | None = None
    """Maximum number of tokens per response; null uses the default of each task."""


def load_questions(settings: TaskSettings) -> list[tuple[Task, list[Question]]]:
    """Read the questions of each task.

    Raises:
        DataError: rows of a task are missing or invalid.
    """
    paths = settings.eval_task_data
    return [
        (task, task.read(ReadOptions(path=paths.get(task.name), limit=settings.eval_task_rows)))
        for task in get_tasks(settings.eval_tasks, paths, setting="eval_task_data.{}")
    ]


def check_tasks(settings: TaskSettings) -> None:
    """Raise ConfigError if a task is unknown or lacks its rows."""
    paths: Mapping[str, str] = settings.eval_task_data
    get_tasks(settings.eval_tasks, paths, setting="eval_task_data.{}")
    require(
        settings.eval_task_rows > 0,
        f"eval_task_rows must be positive, got {settings.eval_task_rows}",
    )
    require(
        settings.eval_task_tokens is None or settings.eval_task_tokens > 0,
        f"eval_task_tokens must be positive or null, got {settings.eval_task_tokens}",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The model, the tasks, and how responses are sampled."""

    path: str = ""
    """Model directory, such as OUT/step3_ppo/actor, a run's output directory, or a Hub id."""

    method: str | None = None
    """Method whose model is taken from a run's output directory: ppo, grpo, ..."""

    tasks: tuple[str, ...] = ()
    """Tasks to evaluate: gsm8k, ifeval, embedded, arithmetic."""

    data: tuple[str, ...] = ()
    """Data paths, as gsm8k=FILE_OR_NAME; if a data set has a test split, that split is used."""

    k: tuple[int, ...] = (1,)
    """Values of k for pass@k, the probability that any of k responses is correct; 1 is accuracy."""

    samples: int | None = None
    """Number of responses per question; null uses the largest k."""

    temperature: float | None = None
    """Sampling temperature; null uses 0 (greedy) for one response and 1 for several."""

    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""

    max_new_tokens: int | None = None
    """Maximum number of tokens per response; null uses the default of each task."""

    shots: int = 0
    """Number of demonstrations before each question of gsm8k, as earlier turns."""

    instruction: str = ""
    """Text appended to each question of gsm8k; empty leaves questions as in training."""

    limit: int | None = None
    """Maximum number of questions per task; null uses all."""

    threads: int | None = None
    """Number of CPU threads; null uses RLHF_THREADS or, if that is unset, one per core."""

    seed: int = 0
    """The same seed draws the same responses."""

    batch_size: int = 32
    """Number of responses sampled at once; it does not affect the results."""

    output: Path = Path("evaluation.json")
    """JSON file for all metrics and their settings; the responses with their grades are written
    next to it as .jsonl. Existing files are replaced."""

    def __post_init__(self) -> None:
        require(bool(self.path), "--path is missing: pass a model directory")
        require(bool(self.tasks), "--tasks is missing: pass one or more, such as embedded or gsm8k")
        tasks = get_tasks(self.tasks, self.paths, setting="--data {}=PATH")
        require(
            bool(self.k) and all(k > 0 for k in self.k),
            f"--k must be positive, got {' '.join(map(str, self.k)) or 'none'}",
        )
        require(
            max(self.k) <= self.num_samples,
            f"--k {max(self.k)} needs that many responses per question, but --samples is"
            f" {self.samples}; raise --samples",
        )
        require(
            self.num_samples == 1 or self.temperature != 0,
            f"--temperature 0 gives the same response {self.num_samples} times; raise it, or leave"
            " --k and --samples at 1",
        )
        require(self.shots >= 0, f"--shots must be at least 0, got {self.shots}")
        any_shots = any(task.takes_shots for task in tasks)
        require(any_shots or not self.shots, "--shots is only for gsm8k; omit it")
        require(any_shots or not self.instruction, "--instruction is only for gsm8k; omit it")
        require(self.limit is None or self.limit > 0, f"--limit must be positive, got {self.limit}")
        require(
            self.max_new_tokens is None or self.max_new_tokens > 0,
            f"--max-new-tokens must be positive, got {self.max_new_tokens}",
        )
        require(self.batch_size > 0, f"--batch-size must be positive, got {self.batch_size}")
        require(
            self.output != self.responses_path,
            f"--output {self.output} names the file of responses; pass a name that ends in .json",
        )

    @property
    def paths(self) -> Mapping[str, str]:
        """Data paths by task."""
        return parse_paths(self.data, setting="--data")

    def read_options(self, task: Task) -> ReadOptions:
        """Return the options with which the rows of a task are read."""
        return ReadOptions(
            path=self.paths.get(task.name),
            limit=self.limit,
            shots=self.shots if task.takes_shots else 0,
            instruction=self.instruction if task.takes_shots else "",
        )

    @property
    def responses_path(self) -> Path:
        """JSON Lines file: a question per line, with its responses and their grades."""
        return self.output.with_suffix(".jsonl")

    @property
    def num_samples(self) -> int:
        """Number of responses per question."""
        return max(self.k) if self.samples is None else self.samples

    @property
    def sampling_temperature(self) -> float:
        """`temperature`, or the default if it is null."""
        if self.temperature is None:
            return 0.0 if self.num_samples == 1 else 1.0
        return self.temperature
