"""Reward sources and their files, which are read once and checked before a model is loaded."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RowColumns
from pipeline.system.errors import require
from rewards.config import RewardConfig
from rewards.contract import Scorer
from rewards.endpoint import Endpoint, make_endpoint, remote_scorer
from rewards.functions import FORMS, FunctionFile, function_scorer, read_function, read_text
from rewards.judge import TEMPLATE, judge_scorer, template_columns
from rewards.math_answers import math_scorer
from rewards.sandbox import check_sandbox, code_scorer
from rewards.verifiers import exact_scorer, length_scorer, regex_scorer, verifier_scorer


@dataclass(frozen=True)
class Source:
    """The settings of a source and the contents of its files."""

    config: RewardConfig

    function: FunctionFile | None = None

    template: str | None = None
    """A judge's template."""

    timeout_seconds: float = 10.0
    """Maximum seconds per program call or request."""

    @property
    def name(self) -> str:
        """Name in metrics and messages."""
        return self.config.name

    @property
    def uses_network(self) -> bool:
        """Whether the source calls an endpoint, and therefore has its own worker process."""
        return self.config.kind in ("remote", "judge")

    @property
    def is_batched(self) -> bool:
        """Whether one call scores all episodes that are submitted together, rather than one."""
        return self.uses_network or (self.function is not None and self.function.form != "verl")

    def call_timeout(self, count: int) -> float:
        """Return the time limit, in seconds, of a call with `count` episodes."""
        if self.config.kind == "code":
            # A program that hangs is incorrect, not a failure of the source.
            return self.config.seconds + self.timeout_seconds
        if self.uses_network:
            # Requests have their own timeouts; this bounds their total.
            concurrency = self.config.concurrency if self.config.kind == "judge" else count
            return math.ceil(count / concurrency) * self.endpoint.max_total_seconds + 5.0
        return self.timeout_seconds

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of a remote service or judge.

        Raises:
            ConfigError: see `make_endpoint`.
        """
        url = self.config.path or ""
        if self.config.kind == "judge":
            url = f"{url.rstrip('/')}/chat/completions"
        return make_endpoint(self.config, url, self.timeout_seconds)

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the rows must have; a function receives all columns that exist."""
        if self.config.kind == "judge":
            return template_columns(self.template or "", self.name)
        if self.function is not None:
            return frozenset(self.function.column(n, self.config) for n in self.function.required)
        column = self.config.resolved_column
        return frozenset({column} if column else ())

    @property
    def fingerprint(self) -> str | None:
        """SHA-256 of the source's file; None if it has no file."""
        if self.function is not None:
            return self.function.sha256
        return None if self.template is None else hashlib.sha256(self.template.encode()).hexdigest()

    @property
    def note(self) -> str | None:
        """A note for the log on how the reward function is called; None for other sources."""
        if self.function is None:
            return None
        form = FORMS[self.function.form]
        return f"rewards.{self.name}: {self.config.path} is called as {form}"


def read_source(config: RewardConfig, *, timeout_seconds: float = 10.0) -> Source:
    """Read a source, and check that it can be used, without running user code.

    Raises:
        ConfigError: the source can't be used; the message gives the reason.
    """
    require(
        config.kind not in ("model", "environment"),
        f"rewards.{config.name}: kind {config.kind} can't be used here; use another kind",
    )
    function = read_function(config) if config.kind == "function" else None
    template = None
    if config.kind == "judge":
        where = f"rewards.{config.name}.template"
        template = TEMPLATE if config.template is None else read_text(Path(config.template), where)
        template_columns(template, config.name)
    source = Source(config, function, template, timeout_seconds)
    if function is None:
        make_scorer(source)
    if config.kind == "code":
        check_sandbox(config)
    return source


def read_sources(configs: Sequence[RewardConfig], *, timeout_seconds: float = 10.0) -> list[Source]:
    """Read the sources of a run, whose names must be distinct."""
    names = [config.name for config in configs]
    for name in names:
        require(names.count(name) == 1, f"rewards: two sources are named {name}; rename one")
    return [read_source(config, timeout_seconds=timeout_seconds) for config in configs]


def row_columns(sources: Sequence[Source]) -> RowColumns:
    """Return the columns of the rows that the sources read in addition to the dialogue."""
    required = frozenset[str]().union(*(source.columns for source in sources))
    return RowColumns(required, all=any(source.function is not None for source in sources))


def make_scorer(source: Source) -> Scorer:
    """Return the scorer of a source, to be called in a worker process.

    Raises:
        ConfigError: a pattern or an endpoint can't be used.
        Exception: any exception that the user's file raises.
    """
    config = source.config
    if source.function is not None:
        return function_scorer(source.function, config)
    if config.kind == "remote":
        return remote_scorer(config, source.endpoint)
    if config.kind == "judge":
        return judge_scorer(config, source.template or "", source.endpoint)
    return _VERIFIERS[config.kind](config)


_VERIFIERS: dict[str, Callable[[RewardConfig], Scorer]] = {
    "math": math_scorer,
    "exact": exact_scorer,
    "verifier": verifier_scorer,
    "regex": regex_scorer,
    "code": code_scorer,
    "length": length_scorer,
}
