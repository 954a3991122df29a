"""Settings of reward sources, and their short forms."""

import math
import re
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import yaml

from pipeline.settings.build import Layer, build_config
from pipeline.system.errors import ConfigError, require, suggestion

Kind = Literal[
    "model",
    "environment",
    "verifier",
    "function",
    "math",
    "exact",
    "regex",
    "length",
    "repetition",
    "code",
    "remote",
    "judge",
]

Form = Literal["auto", "episodes", "trl", "trl_conversational", "openrlhf", "verl"]

COLUMNS = {
    "verifier": "answer",
    "math": "answer",
    "exact": "answer",
    "code": "tests",
    "remote": "label",
}
"""The column that a kind reads, where the settings name no other."""

Pool = Literal["mean", "uwo", "min"]
"""How the scores of several reward models become one."""

SCALE = (0.0, 10.0)
"""The lowest and highest score a judge may give, where the settings name no other."""

_USED_BY: dict[str, set[str]] = {
    "path": {"model", "function", "remote", "judge"},
    "members": {"model"},
    "pool": {"model"},
    "pool_lambda": {"model"},
    "pattern": {"regex", "exact"},
    "column": {"function", "math", "exact", "code", "remote"},
    "form": {"function"},
    "max_tokens": {"length"},
    "buffer_tokens": {"length"},
    "ngram": {"repetition"},
    "seconds": {"code"},
    "memory_mb": {"code"},
    "sandbox": {"code"},
    "model": {"judge"},
    "template": {"judge"},
    "scale": {"judge"},
    "concurrency": {"judge"},
    "attempts": {"remote", "judge"},
    "key_variable": {"remote", "judge"},
    "insecure": {"remote", "judge"},
}
"""Which kinds read a setting: beside another kind it is a mistake, and refused."""

_NEEDED = {
    "function": ("path", "the function, as file.py:name"),
    "regex": ("pattern", "a regular expression"),
    "length": ("max_tokens", "the longest response that costs nothing"),
    "remote": ("path", "the address of the service"),
    "judge": ("path", "the address of the endpoint, as https://HOST/v1"),
}


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """A source of rewards: what gives a number for each response, and what it weighs."""

    name: str
    """What metrics and messages call it."""

    kind: Kind
    """model: step 3's reward model; environment: what its environment gives; function: a Python
    function of yours; math, exact, regex, length, repetition: programs that read the response;
    verifier: the one of the embedded task, 1 for an answer that is correct and polite, else 0;
    code: tests that run the program in the response; remote: a service; judge: a language model
    behind an OpenAI-compatible endpoint."""

    weight: float = 1.0
    """What it weighs in the sum; a source of weight 0 is measured alone."""

    path: str | None = None
    """model: its directory, null takes step 2's; function: file.py:name; remote and judge:
    an address."""

    members: tuple[str, ...] = ()
    """model: directories of further reward models; the scores of all are normalized and pooled."""

    pool: Pool = "mean"
    """model, of several: mean; uwo, mean - pool_lambda * variance; min, the worst case."""

    pool_lambda: float = 0.1
    """model, pool uwo: how much disagreement costs."""

    pattern: str = ""  # a text or None would be None at "####", a comment to YAML
    """regex: what the response must contain, `.` matches line ends too; exact: what finds the
    answer in the response, in its first group, at its last match."""

    column: str | None = None
    """Column of the rows that it compares with: the answer, label or tests."""

    form: Form = "auto"
    """function: which parameters it takes; auto goes by their names."""

    max_tokens: int | None = None
    """length: tokens of the longest response that costs nothing."""

    buffer_tokens: int = 0
    """length: tokens beyond that over which the reward falls from 0 to -1."""

    ngram: int = 4
    """repetition: words of a phrase that counts as repeated."""

    seconds: float = 5.0
    """code: time of the program with all tests of a row."""

    memory_mb: int = 512
    """code: address space of the program."""

    sandbox: Literal["namespaces", "process"] = "namespaces"
    """code: namespaces keeps the program from files, network and other processes by the kernel's
    means; process does without, where the kernel refuses them: for programs that you trust."""

    model: str | None = None
    """judge: the model's name at the endpoint."""

    template: str | None = None
    """judge: a text file with {prompt}, {response} and columns in braces; null takes ours."""

    scale: tuple[float, float] = SCALE
    """judge: its lowest and highest score, which become 0 and 1."""

    concurrency: int = 8
    """judge: requests at once."""

    attempts: int = 4
    """remote, judge: requests until an answer comes, with growing pauses between them."""

    key_variable: str | None = None
    """remote, judge: name of the environment variable that holds the key."""

    insecure: bool = False
    """remote, judge: allow http:// to other machines."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z]\w*", self.name) is not None,
            f"rewards: a source's name must be letters, digits and _, got {self.name!r}",
        )
        where = f"rewards.{self.name}"
        for field in fields(self):
            kinds = _USED_BY.get(field.name)
            given = getattr(self, field.name) != field.default
            require(
                kinds is None or self.kind in kinds or not given,
                f"{where}.{field.name} is a setting of kind {', '.join(sorted(kinds or ()))};"
                f" {self.kind} does not read it",
            )
        if needed := _NEEDED.get(self.kind):
            name, meaning = needed
            require(
                getattr(self, name) not in (None, ""),
                f"{where}.{name} is missing: kind {self.kind} needs {meaning}",
            )
        require(
            self.kind != "judge" or self.model is not None,
            f"{where}.model is missing: kind judge needs the model's name at the endpoint",
        )
        self._check_pool(where)
        self._check_numbers(where)

    def _check_pool(self, where: str) -> None:
        paths = [*self.members, *([self.path] if self.members and self.path else [])]
        require(
            len({*paths}) == len(paths) and all(paths),
            f"{where}.members names a model twice, or none; give the directory of each once",
        )
        require(
            bool(self.members) or self.pool == "mean",
            f"{where}.pool {self.pool} needs {where}.members: the other reward models",
        )
        require(
            self.pool == "uwo" or self.pool_lambda == type(self).pool_lambda,
            f"{where}.pool_lambda is a setting of pool uwo; {self.pool} does not read it",
        )
        require(
            math.isfinite(self.pool_lambda) and self.pool_lambda >= 0,
            f"{where}.pool_lambda must be 0 or more, got {self.pool_lambda}",
        )

    def _check_numbers(self, where: str) -> None:
        require(math.isfinite(self.weight), f"{where}.weight must be finite, got {self.weight}")
        for name in ("ngram", "memory_mb", "concurrency", "attempts"):
            value = getattr(self, name)
            require(value >= 1, f"{where}.{name} must be 1 or more, got {value}")
        require(
            self.max_tokens is None or self.max_tokens >= 0,
            f"{where}.max_tokens must be 0 or more, got {self.max_tokens}",
        )
        require(
            self.buffer_tokens >= 0,
            f"{where}.buffer_tokens must be 0 or more, got {self.buffer_tokens}",
        )
        require(self.seconds > 0, f"{where}.seconds must be above 0, got {self.seconds}")
        low, high = self.scale
        require(low < high, f"{where}.scale must be a low and a higher score, got {low} {high}")

    @property
    def reads_column(self) -> str | None:
        """The column of the rows that it compares with; None where it reads none by itself."""
        return self.column or COLUMNS.get(self.kind)


def check_limits(*, timeout_seconds: float, workers: int, max_failures: float = 0.0) -> None:
    """Refuse what no workers can keep.

    Raises:
        ConfigError: it begins with the setting's name.
    """
    require(timeout_seconds > 0, f"timeout_seconds must be above 0, got {timeout_seconds}")
    require(workers >= 1, f"workers must be 1 or more, got {workers}")
    require(0 <= max_failures <= 1, f"max_failures must lie between 0 and 1, got {max_failures}")


KINDS: tuple[str, ...] = typing.get_args(Kind)

_ARGUMENT = {
    "function": "path",
    "remote": "path",
    "regex": "pattern",
    "exact": "pattern",
    "length": "max_tokens",
    "math": "column",
    "code": "column",
}
"""The setting that follows a kind's name and a colon."""


def read_spec(spec: str, taken: Collection[str] = (), *, option: str = "--reward") -> RewardConfig:
    """The source that a word describes.

    `file.py:name` is a function; `math`, `exact`, ... a kind; `regex:PATTERN`, `length:256` a kind
    with what it needs; `{kind: length, max_tokens: 256, buffer_tokens: 64}` says all settings.

    Args:
        spec: the word.
        taken: names of other sources; one that is taken gets a number.
        option: in which it stands, for messages.

    Raises:
        ConfigError: it describes no source.
    """
    if spec.lstrip().startswith("{"):
        return source_of(_mapping(spec, option), taken, option=option)
    kind, colon, argument = spec.partition(":")
    if kind.endswith(".py"):
        return source_of({"kind": "function", "path": spec}, taken, option=option)
    if kind not in KINDS:
        raise ConfigError(
            f"{option} {spec}: give file.py:function, a kind, or settings in braces; there is no"
            f" kind {kind}, {suggestion(kind, KINDS)}"
        )
    if not colon:
        return source_of({"kind": kind}, taken, option=option)
    if kind not in _ARGUMENT:
        raise ConfigError(f"{option} {spec}: kind {kind} takes its settings in braces")
    return source_of({"kind": kind, _ARGUMENT[kind]: argument}, taken, option=option)


def read_specs(specs: Iterable[str]) -> list[RewardConfig]:
    """The sources of several words, with different names."""
    sources: list[RewardConfig] = []
    for spec in specs:
        sources.append(read_spec(spec, [source.name for source in sources]))
    return sources


def source_of(
    settings: Mapping[str, Any], taken: Collection[str] = (), *, option: str = "--reward"
) -> RewardConfig:
    """The source that a mapping of settings describes; a missing name is made up.

    Raises:
        ConfigError: an unknown setting, a wrong type or value.
    """
    kind = str(settings.get("kind", ""))
    if kind not in KINDS:
        what = f"there is no kind {kind}" if kind else "kind is missing"
        raise ConfigError(f"{option} {dict(settings)}: {what}; {suggestion(kind, KINDS)}")
    name = str(settings.get("name") or _name(settings, taken))
    layer = Layer({**settings, "name": name}, option)
    return build_config(RewardConfig, [layer], section=f"rewards.{name}.")


def _mapping(spec: str, option: str) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(spec)
    except yaml.YAMLError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(
            f"{option} {spec} is not a mapping of settings, such as {{kind: math, weight: 2}}"
        )
    return settings


def _name(settings: Mapping[str, Any], taken: Collection[str]) -> str:
    """What a source is called whose settings don't say: its function, or its kind."""
    kind = str(settings.get("kind"))
    base = str(settings.get("path", "")).rpartition(":")[2] if kind == "function" else kind
    numbered = (f"{base}_{number}" for number in range(2, len(taken) + 3))
    return base if base not in taken else next(each for each in numbered if each not in taken)
