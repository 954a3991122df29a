"""The model card of an exported model: what it is, what it was trained on, how well it does.

A card is README.md with YAML in front, as the Hugging Face Hub reads it (its documentation, "Model
Cards"). It names files without their directories, so that it can be published as it is.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.files.durable import replace_durably

CARD = "README.md"

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Card:
    """What a step knows of a model that it exports."""

    title: str
    """As `Reward model`."""

    method: str
    """A sentence: how it was trained."""

    base: str
    """The model that training began with: a name on the Hub, `embedded`, or a directory."""

    tags: tuple[str, ...]


def write_card(
    directory: Path,
    card: Card,
    *,
    data: Sequence[str],
    figures: Mapping[str, object],
    settings: Mapping[str, object],
) -> None:
    """Write the card of the model in `directory`, whole or not at all.

    `data` are the paths of the training data, as the user gave them; `figures` those of the
    evaluation on held-out rows, mappings in it listed entry by entry; `settings` those that differ
    from the defaults, by their dotted names.
    """
    base = card.base if _is_on_hub(card.base) else None
    front = ["library_name: transformers", *([f"base_model: {base}"] if base else []), "tags:"]
    lines = ["---", *front, *(f"- {tag}" for tag in ("rlhf", *card.tags)), "---", ""]
    lines += [f"# {card.title}", "", card.method, ""]
    lines += [f"- Base model: {_public(card.base)}"]
    lines += [f"- Data: {', '.join(map(_public, data))}", ""]
    lines += ["## Evaluation", "", "On rows that no step of the run trained on:", ""]
    lines += ["| figure | value |", "|---|---|"]
    lines += [f"| `{name}` | {value} |" for name, value in _flat(figures)]
    lines += ["", "## Settings", "", "Those that differ from the defaults:", "", "```yaml"]
    # What names a place on the machine of the run is left out.
    written = {name: json.dumps(value) for name, value in settings.items()}
    lines += [f"{name}: {value}" for name, value in written.items() if "/" not in value]
    lines += ["```", ""]
    text = "\n".join(lines)
    replace_durably(directory / CARD, text.encode(), temporary=directory / f"{CARD}.tmp")


def _is_on_hub(path: str) -> bool:
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def _public(path: str) -> str:
    """A name on the Hub as it is, of a file or directory its name alone."""
    return path if _is_on_hub(path) else Path(path).name


def _flat(figures: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}: ")
        elif isinstance(value, float):
            yield f"{prefix}{name}", f"{value:.4g}"
        else:
            yield f"{prefix}{name}", str(value)
