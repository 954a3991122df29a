"""A DeepSpeed configuration file as settings of ours.

    settings = read_deepspeed_config("ds_config.json", world=8, given={"batch_size": 32, ...})
    settings.model      {"zero_stage": 2, "zero.offload.optimizer": "cpu", "optim.lr": 1e-5, ...}
    settings.step       {"batch_size": 32, "micro_batch_size": 4, ...}
    settings.notice()   which keys have no effect, and why

Every key is used, noted or refused: `pipeline.config.deepspeed.keys` has the table. Like DeepSpeed,
files may have comments and trailing commas, and no key twice.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pipeline.config import Tracker
from pipeline.config.deepspeed.batches import resolve_batch_sizes
from pipeline.config.deepspeed.keys import ALIASES, KEYS
from pipeline.config.deepspeed.optim import optim_settings
from pipeline.config.deepspeed.precision import precision_settings
from pipeline.config.deepspeed.values import Values
from pipeline.config.deepspeed.zero import zero_settings
from pipeline.errors import ConfigError

FREE_SECTIONS = ("optimizer.params", "scheduler.params")
"""Their keys depend on the type next to them."""

SECTIONS = frozenset(
    name.rsplit(".", depth)[0]
    for name in (*KEYS, *FREE_SECTIONS)
    for depth in range(1, name.count(".") + 1)
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """What a file sets, by dotted names of ours."""

    origin: str
    """The file, for messages."""

    model: Mapping[str, Any]
    """Settings of each model that trains: `zero_stage`, `zero.*`, `optim.*`, `precision`, ..."""

    step: Mapping[str, Any]
    """Settings of the step: `batch_size`, `micro_batch_size`, `trackers`."""

    no_effect: Mapping[str, str]
    """Keys of the file that change nothing here, and why."""

    def notice(self) -> str | None:
        """One text that names every key without effect, by reason; None where there is none."""
        return _notice(self.no_effect, self.origin)


def notice_of(path: Path) -> str | None:
    """The notice of a file, whatever it comes to in a step.

    Raises:
        ConfigError: no such file, not JSON, a key twice, an unknown or a refused key.
    """
    _, no_effect = _sort_keys(_parse(path), str(path))
    return _notice(no_effect, str(path))


def read_deepspeed_config(
    source: Path | str | Mapping[str, Any],
    *,
    world: int = 1,
    given: Mapping[str, Any] | None = None,
) -> DeepSpeedSettings:
    """Read a DeepSpeed configuration.

    Args:
        source: a file, or what one holds.
        world: processes that share a batch.
        given: our settings by dotted name, from which "auto" is resolved: `batch_size`,
            `micro_batch_size`, `precision`, `optim.lr`, `optim.betas`, `optim.eps`,
            `optim.weight_decay`, `optim.max_grad_norm`, and `optim.warmup_steps` and `total_steps`
            where they are known.

    Raises:
        ConfigError: no such file, not JSON, a key twice, an unknown or a refused key, a value that
            doesn't fit, batch sizes that don't agree, an "auto" that nothing resolves.
    """
    if isinstance(source, Mapping):
        origin, content = "the DeepSpeed configuration", dict(source)
    else:
        origin, content = str(source), _parse(Path(source))
    leaves, no_effect = _sort_keys(content, origin)
    values = Values(leaves, origin=origin, given=given or {})
    model = {**zero_settings(values), **precision_settings(values), **optim_settings(values)}
    step = {**_batch_settings(values, world=world), **_tracker_settings(values)}
    if values.unresolved:
        raise ConfigError(
            f'{origin} leaves {", ".join(values.unresolved)} "auto", which nothing here resolves;'
            " write the values into the file"
        )
    return DeepSpeedSettings(origin=origin, model=model, step=step, no_effect=no_effect)


# Strings are matched first, so that what looks like a comment or a comma within one stays.
_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])')


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such DeepSpeed configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if twice:
            raise ConfigError(f"{path} has {', '.join(twice)} twice in one section; keep one")
        return dict(pairs)

    text = _COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)
    text = _TRAILING_COMMA.sub(lambda match: match[1] or " ", text)
    try:
        content = json.loads(text, object_pairs_hook=distinct)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for a DeepSpeed configuration") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one JSON object of settings, {{...}}")
    return content


def _sort_keys(content: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The used leaves of the file by dotted key, and its keys without effect with the reason."""
    leaves: dict[str, Any] = {}
    no_effect: dict[str, str] = {}
    for name, value, switched_off in _walk(_normalized(content, origin), origin):
        key = KEYS.get(name)
        if value is None:
            continue
        if key is None or key.fate == "used":
            target = ALIASES.get(name, name)
            if target in leaves:
                raise ConfigError(f"{origin} has {target} twice, under two names; keep one")
            leaves[target] = value
        elif key.fate == "refused":
            if not key.asks_for_nothing(value):
                raise ConfigError(f"{name} in {origin} {key.text}")
        elif not switched_off:
            no_effect[name] = key.text
    return leaves, no_effect


def _notice(no_effect: Mapping[str, str], origin: str) -> str | None:
    if not no_effect:
        return None
    by_reason: dict[str, list[str]] = {}
    for key, reason in no_effect.items():
        by_reason.setdefault(reason, []).append(key)
    lines = [f"  {', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]
    return "\n".join([f"these keys of {origin} have no effect here:", *lines])


def _normalized(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Old spellings of whole sections as today's."""
    content = dict(content)
    if "bfloat16" in content:
        if "bf16" in content:
            raise ConfigError(f"{origin} has bf16 and bfloat16, which are the same; keep bf16")
        content["bf16"] = content.pop("bfloat16")
    if isinstance(content.get("zero_optimization"), bool):
        content["zero_optimization"] = {"stage": int(content["zero_optimization"])}
    return content


def _walk(
    section: Mapping[str, Any], origin: str, prefix: str = "", *, switched_off: bool = False
) -> Iterator[tuple[str, Any, bool]]:
    """Each known key with its value, and whether its section says `"enabled": false`."""
    for word, value in section.items():
        name = f"{prefix}{word}"
        if word.startswith("_"):  # "_comment", as JSON itself has none
            continue
        if name in FREE_SECTIONS:
            for inner, setting in _section(name, value, origin).items():
                yield f"{name}.{inner}", setting, switched_off
        elif name in KEYS:
            yield name, value, switched_off
        elif name in SECTIONS:
            inner_section = _section(name, value, origin)
            off = switched_off or inner_section.get("enabled") is False
            yield from _walk(inner_section, origin, f"{name}.", switched_off=off)
        else:
            raise ConfigError(
                f"{name} in {origin} is not a key of DeepSpeed's configuration; {_meant(name)}"
            )


def _section(name: str, value: object, origin: str) -> Mapping[str, Any]:
    if value is None or value is False:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} in {origin} must hold settings, {{...}}, got {value!r}")
    return value


def _meant(name: str) -> str:
    """A hint at the key that `name` was likely meant to be."""
    names = [*KEYS, *SECTIONS]
    section, _, last = name.rpartition(".")
    candidates: Sequence[Sequence[str]] = (
        [known for known in names if known.rpartition(".")[2] == last],
        difflib.get_close_matches(
            name, [known for known in names if known.rpartition(".")[0] == section], 1, 0.75
        ),
        difflib.get_close_matches(name, names, 1, 0.75),
        [
            known
            for end in difflib.get_close_matches(
                last, [known.rpartition(".")[2] for known in names], 1, 0.8
            )
            for known in names
            if known.rpartition(".")[2] == end
        ],
    )
    found = next((found for found in candidates if found), ())
    meant = " or ".join(found[:2])
    return f"did you mean {meant}?" if meant else "docs/deepspeed.md lists the keys; remove it"


def _batch_settings(values: Values, *, world: int) -> dict[str, int]:
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    train, micro, accumulation = (
        None if values.is_auto(name) else values.whole(name, low=1) for name in names
    )
    explicit = sum(size is not None for size in (train, micro, accumulation))
    # One number leaves a choice: "auto" makes it, with our own setting.
    if explicit <= 1 and micro is None and values.is_auto(names[1]):
        micro = values.whole(names[1], "micro_batch_size", low=1)
        if micro is not None and train is not None:
            micro = _fitting(micro, train, world)
        explicit += train is not None or accumulation is not None
    if explicit <= 1 and train is None and values.is_auto(names[0]):
        train = values.whole(names[0], "batch_size", low=1)
    if any(name in values.unresolved for name in names):
        return {}
    if explicit == 0:
        # Nothing but "auto": our own sizes hold as they are, and need no common divisor.
        return _present({"batch_size": train, "micro_batch_size": micro})
    try:
        sizes = resolve_batch_sizes(train, micro, accumulation, world=world)
    except ConfigError as error:
        raise ConfigError(f"{values.origin}: {error}") from None
    return {"batch_size": sizes.train, "micro_batch_size": sizes.micro}


def _fitting(micro: int, train: int, world: int) -> int:
    """The largest micro-batch up to `micro` that divides a process's share of the batch."""
    share, rest = divmod(train, world)
    if rest or share == 0:
        return micro  # refused later, with all numbers
    return max(size for size in range(1, min(micro, share) + 1) if share % size == 0)


def _tracker_settings(values: Values) -> dict[str, tuple[str, ...]]:
    wanted = tuple(name for name in get_args(Tracker) if values.flag(f"{name}.enabled"))
    return {"trackers": wanted} if wanted else {}


def _present(settings: Mapping[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in settings.items() if value is not None}
