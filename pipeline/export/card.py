"""README.md of an export: the card of the model, and what was verified."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.models.card import CARD

HEADING = "## Export"


def write_export_card(
    source: Path, directory: Path, *, form: str, verified: Sequence[str], use: str
) -> None:
    """Write the card of `source` (data, settings, figures) with a section on this export.

    A model without a card gets one that names its directory and has that section alone.
    """
    own = source / CARD
    if not own.is_file() and (source.parent / CARD).is_file():  # an adapter lies below its model
        own = source.parent / CARD
    if own.is_file():
        text = own.read_text(encoding="utf-8").split(f"\n{HEADING}\n")[0].rstrip()
    else:
        text = f"# {source.resolve().name}"
    lines = [text, "", HEADING, "", f"Form: {form}.", "", "Verified after writing:", ""]
    lines += [f"- {each}" for each in verified]
    lines += ["", "Use:", "", "```", use, "```", ""]
    (directory / CARD).write_text("\n".join(lines), encoding="utf-8")
