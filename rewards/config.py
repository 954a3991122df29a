"""Settings of reward sources, and their short forms."""

import itertools
import math
import re
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
    "code",
    "remote",
    "judge",
]

Form = Literal["auto", "episodes", "trl", "trl_conversational", "openrlhf", "verl"]

DEFAULT_SCALE = (0.0, 10.0)
"""Default lowest and highest score of a judge."""


@dataclass(frozen=True)
class _KindSpec:
    """Settings of a kind of source, and the column that it reads."""

    settings: tuple[str, ...] = ()
    """Settings of the kind; others are rejected. In KIND:VALUE, VALUE sets the first one."""

    required: tuple[str, ...] = ()
    """Settings without a default."""

    column: str = ""
    """Column that the kind reads by default; empty if it reads none."""

    maximum: float = 1.0
    """Maximum reward; 1 by convention for functions and environments."""


_REQUEST_SETTINGS = ("attempts", "key_variable", "insecure")

KINDS: dict[str, _KindSpec] = {
    "model": _KindSpec(("path",), maximum=math.inf),
    "environment": _KindSpec(),
    "verifier": _KindSpec(column="answer"),
    "function": _KindSpec(("path", "form", "column"), required=("path",)),
    "math": _KindSpec(("column",), column="answer"),
    "exact": _KindSpec(("pattern", "column"), column="answer"),
    "regex": _KindSpec(("pattern",), required=("pattern",)),
    "length": _KindSpec(("max_tokens", "buffer_tokens"), required=("max_tokens",), maximum=0.0),
    "code": _KindSpec(("column", "seconds", "memory_mb", "sandbox"), column="tests"),
    "remote": _KindSpec(
        ("path", "column", *_REQUEST_SETTINGS),
        required=("path",),
        column="label",
        maximum=math.inf,
    ),
    "judge": _KindSpec(
        ("path", "model", "template", "scale", "concurrency", *_REQUEST_SETTINGS),
        required=("path", "model"),
    ),
}
"""Settings, column and maximum of each `kind`; the scoring functions are in `rewards.sources`."""

_MINIMUMS = {
    **dict.fromkeys(("memory_mb", "concurrency", "attempts"), 1),
    **dict.fromkeys(("max_tokens", "buffer_tokens"), 0),
}


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """A reward source, which returns a number for each response, and its weight."""

    name: str
    """Name in metrics and messages."""

    kind: Kind
    """model: step 3's reward model; environment: the environment's reward; function: your own
    Python function; math, exact, regex, length: built-in checks; verifier: the embedded task's
    check, 1 for a correct and polite response, else 0; code: unit tests for the program in the
    response; remote: a web service; judge: an LLM behind an OpenAI-compatible endpoint."""

    weight: float = 1.0
    """Weight in the sum; a source with weight 0 is only measured."""

    path: str | None = None
    """model: its directory (default: step 2's); function: file.py:name; remote, judge: a URL."""

    pattern: str = ""  # not `str | None`: YAML reads "####" as a comment, thus None
    """regex: the expression to find in the response, where `.` also matches newlines; exact:
    extracts the answer from the response, as the first group of the last match."""

    column: str | None = None
    """Column of the rows that the source reads: the answer, label or tests."""

    form: Form = "auto"
    """function: form of its parameters; auto detects it from their names."""

    max_tokens: int | None = None
    """length: number of tokens in a response above which a penalty applies."""

    buffer_tokens: int = 0
    """length: number of tokens beyond max_tokens over which the reward falls from 0 to -1."""

    seconds: float = 5.0
    """code: time limit of the program for all tests of a row."""

    memory_mb: int = 512
    """code: limit on the program's address space in MiB."""

    sandbox: Literal["namespaces", "process"] = "namespaces"
    """code: namespaces uses kernel features to isolate the program from files, the network and
    other processes; process does not isolate it, so it works on any kernel, but use it only for
    programs that you trust."""

    model: str | None = None
    """judge: the model's name at the endpoint."""

    template: str | None = None
    """judge: a text file with {prompt}, {response} and columns in braces; null uses a default."""

    scale: tuple[float, float] = DEFAULT_SCALE
    """judge: the lowest and highest score, which are mapped to 0 and 1."""

    concurrency: int = 8
    """judge: maximum number of concurrent requests."""

    attempts: int = 4
    """remote, judge: maximum attempts per request, with increasing pauses between them."""

    key_variable: str | None = None
    """remote, judge: name of the environment variable that holds the API key."""

    insecure: bool = False
    """remote, judge: allow http:// to other machines."""

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[A-Za-z]\w*", self.name) is not None,
            "rewards: a source's name must begin with a letter and consist of letters, digits and"
            f" _, got {self.name!r}",
        )
        where = f"rewards.{self.name}"
        for field in fields(self):
            kinds = [kind for kind, spec in KINDS.items() if field.name in spec.settings]
            require(
                not kinds or self.kind in kinds or getattr(self, field.name) == field.default,
                f"{where}.{field.name} is not a setting of kind {self.kind}, only of"
                f" {', '.join(sorted(kinds))}",
            )
        for name in KINDS[self.kind].required:
            require(
                getattr(self, name) not in (None, ""),
                f"{where}.{name} is missing: kind {self.kind} requires it",
            )
        for name, minimum in _MINIMUMS.items():
            value = getattr(self, name)
            require(
                value is None or (math.isfinite(value) and value >= minimum),
                f"{where}.{name} must be at least {minimum}, got {value}",
            )
        require(math.isfinite(self.weight), f"{where}.weight must be finite, got {self.weight}")
        require(self.seconds > 0, f"{where}.seconds must be positive, got {self.seconds}")
        low, high = self.scale
        require(low < high, f"{where}.scale must be a lower and a higher score, got {low} {high}")

    @property
    def resolved_column(self) -> str:
        """The column that the source reads: the setting or its kind's default; may be empty."""
        return self.column or KINDS[self.kind].column


def read_spec(
    spec: str, used_names: Collection[str] = (), *, option: str = "--reward"
) -> RewardConfig:
    """Parse a source from an option's value.

    The value is a function, `file.py:name`; a kind, such as `math`; a kind with its first setting,
    `length:256`; or settings in braces, `{kind: length, max_tokens: 256, buffer_tokens: 64}`.

    Args:
        spec: the value.
        used_names: names of other sources; a source without a name is named after its function or
            kind, with a number if that name is in use.
        option: name of the option, for error messages.

    Raises:
        ConfigError: the value is not a valid source.
    """
    settings = _read_settings(spec, option)
    kind = str(settings.get("kind", ""))
    if kind not in KINDS:
        problem = f"there is no kind {kind}" if kind else "kind is missing"
        raise ConfigError(
            f"{option} {spec}: {problem} ({suggestion(kind, KINDS)}); pass file.py:function, a kind"
            " or settings in braces"
        )
    base = str(settings.get("path", "")).rpartition(":")[2] if kind == "function" else kind
    numbered = (f"{base}_{number}" for number in itertools.count(2))
    default = next(name for name in itertools.chain([base], numbered) if name not in used_names)
    name = str(settings.get("name") or default)
    layer = Layer({**settings, "name": name}, option)
    return build_config(RewardConfig, [layer], section=f"rewards.{name}.")


def _read_settings(spec: str, option: str) -> Mapping[str, Any]:
    if spec.lstrip().startswith("{"):
        try:
            settings = yaml.safe_load(spec)
        except yaml.YAMLError:
            settings = None
        if not isinstance(settings, dict):
            raise ConfigError(
                f"{option} {spec} is not a mapping of settings, such as {{kind: math, weight: 2}}"
            )
        return settings
    kind, colon, value = spec.partition(":")
    if kind.endswith(".py"):
        return {"kind": "function", "path": spec}
    names = KINDS.get(kind, _KindSpec()).settings
    require(not colon or kind not in KINDS or bool(names), f"{option} {spec}: pass only {kind}")
    return {"kind": kind, **({names[0]: value} if colon and names else {})}


def read_specs(specs: Iterable[str]) -> list[RewardConfig]:
    """Parse the values of `--reward` as sources with distinct names; see `read_spec`."""
    sources: list[RewardConfig] = []
    for spec in specs:
        sources.append(read_spec(spec, [source.name for source in sources]))
    return sources
