"""Sources of rewards with the files they need, read once and checked before a model is loaded."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RowColumns
from pipeline.errors import require
from rewards.code_tests import check_sandbox, code_scorer
from rewards.config import RewardConfig
from rewards.contract import Scorer
from rewards.endpoint import Answers, Endpoint, endpoint_of, remote_scorer
from rewards.functions import ALL_COLUMNS, FORMS, FunctionFile, read_function, read_text
from rewards.generative import check_generative, generative_scorer
from rewards.judge import TEMPLATE, columns_in, judge_scorer
from rewards.math_answers import math_scorer
from rewards.verifiers import (
    exact_scorer,
    json_schema_scorer,
    length_scorer,
    regex_scorer,
    repetition_scorer,
    verifier_scorer,
)


@dataclass(frozen=True)
class Source:
    """The settings of a source and the contents of its files."""

    config: RewardConfig

    function: FunctionFile | None = None

    text: str | None = None
    """Content of its schema's or template's file, where it has one."""

    cache_dir: Path | None = None
    """Where answers of endpoints are kept."""

    timeout_seconds: float = 10.0
    """Seconds that a call of a program, or a request, may take."""

    @property
    def name(self) -> str:
        """What metrics and messages call it."""
        return self.config.name

    @property
    def waits_for_network(self) -> bool:
        """Whether it asks an endpoint, and computes next to nothing."""
        return self.config.kind in ("remote", "judge")

    @property
    def is_alone(self) -> bool:
        """Whether it has a worker process of its own: it waits, or is too large for several."""
        return self.waits_for_network or self.config.kind == "generative"

    def call_seconds(self, count: int) -> float:
        """The time that a call with `count` episodes may take."""
        if self.config.kind == "code":
            # Programs have a time of their own: one that hangs is wrong, and no failure.
            return self.config.seconds + self.timeout_seconds
        if self.waits_for_network:
            # Requests end by themselves; this is for what does not.
            judges = self.config.concurrency if self.config.kind == "judge" else count
            return math.ceil(count / judges) * self.endpoint.longest_seconds + 5.0
        if self.config.kind == "generative":
            return count * self.timeout_seconds
        return self.timeout_seconds

    @property
    def endpoint(self) -> Endpoint:
        """Where a remote service or judge is asked."""
        url = self.config.path or ""
        if self.config.kind == "judge":
            url = f"{url.rstrip('/')}/chat/completions"
        return endpoint_of(self.config, url, self.timeout_seconds)

    @property
    def kept(self) -> Answers:
        """What endpoints have answered before."""
        return Answers(self.cache_dir)

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the rows that it reads; `functions.ALL_COLUMNS` where it may read any."""
        if self.function is not None:
            return self.function.columns
        if self.config.kind in ("judge", "generative"):
            return columns_in(self.text or "", self.name)
        column = self.config.reads_column
        return frozenset() if column is None else frozenset({column})

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 of its file, None where it has none."""
        if self.function is not None:
            return self.function.sha256
        return None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def note(self) -> str | None:
        """What the log says of it: as what a function was recognized."""
        if self.function is None:
            return None
        form = FORMS[self.function.form]
        return f"rewards.{self.name}: {self.config.path} is called as {form}"


def read_source(
    config: RewardConfig, *, cache_dir: Path | None = None, timeout_seconds: float = 10.0
) -> Source:
    """A source whose files exist and can be used; no code of a user has run.

    Raises:
        ConfigError: a file, function, pattern or schema can't be used.
    """
    require(
        config.kind not in ("model", "environment"),
        f"rewards.{config.name}: kind {config.kind} is known in step 3 alone; leave it out here",
    )
    function = read_function(config) if config.kind == "function" else None
    text = None
    if config.kind == "json_schema" and config.path is not None:
        text = read_text(Path(config.path), f"rewards.{config.name}.path")
    if config.kind in ("judge", "generative"):
        where = f"rewards.{config.name}.template"
        text = TEMPLATE if config.template is None else read_text(Path(config.template), where)
        columns_in(text, config.name)
    source = Source(config, function, text, cache_dir, timeout_seconds)
    if config.kind == "generative":
        check_generative(config)
    elif function is None:
        scorer_of(source)
    if config.kind == "code":
        check_sandbox(config)
    return source


def read_sources(
    configs: Sequence[RewardConfig], *, cache_dir: Path | None = None, timeout_seconds: float = 10.0
) -> list[Source]:
    """The sources of a run, which have names of their own."""
    names = [config.name for config in configs]
    for name in names:
        require(names.count(name) == 1, f"rewards: two sources are named {name}; rename one")
    return [
        read_source(config, cache_dir=cache_dir, timeout_seconds=timeout_seconds)
        for config in configs
    ]


def row_columns(sources: Sequence[Source]) -> RowColumns:
    """Columns of the rows that the sources read beside the dialogue."""
    needed: set[str] = set()
    others: set[str] = set()
    for source in sources:
        # A function may do without a column, and is the one to say so.
        (others if source.function is not None else needed).update(source.columns)
    return RowColumns(
        frozenset(needed), frozenset(others - {ALL_COLUMNS}), all=ALL_COLUMNS in others
    )


def scorer_of(source: Source) -> Scorer:
    """What scores in a worker process.

    Raises:
        ConfigError: a pattern or schema can't be used.
        Exception: whatever the file of a user's function raises.
    """
    if source.function is not None:
        from rewards.functions import function_scorer

        return function_scorer(source.function, source.config.column)
    return _SCORERS[source.config.kind](source)


_SCORERS: dict[str, Callable[[Source], Scorer]] = {
    "math": lambda source: math_scorer(source.config),
    "exact": lambda source: exact_scorer(source.config),
    "verifier": lambda source: verifier_scorer(source.config),
    "regex": lambda source: regex_scorer(source.config),
    "json_schema": lambda source: json_schema_scorer(source.config, source.text),
    "code": lambda source: code_scorer(source.config),
    "remote": lambda source: remote_scorer(source.config, source.endpoint, source.kept),
    "judge": lambda source: judge_scorer(
        source.config, source.text or "", source.endpoint, source.kept
    ),
    "generative": lambda source: generative_scorer(source.config, source.text or ""),
    "length": lambda source: length_scorer(source.config),
    "repetition": lambda source: repetition_scorer(source.config),
}
"""By kind; `function` has its file."""
