"""Ratings: the server's file, and the command `python -m inference.ratings`.

    python -m inference.ratings export FILE ... --out FILE

The file is append-only, and each line is flushed to disk before its id is returned: if the process
is killed, at most the line being written is lost.
"""

import json
import os
import secrets
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.cli.options import parse_command, print_output, run_main
from pipeline.data.rows.shapes import SCHEMA, UNDO
from pipeline.files.durable import check_writable, sync, write_output
from pipeline.system.errors import ConfigError, DataError, counted, require
from pipeline.system.installation import MODULE

USAGE = f"{MODULE} inference.ratings export FILE ... --out FILE"

Rating = Mapping[str, Any]
"""A line of the file; docs/rating.md lists its fields."""


class RatingsFile:
    """Appends ratings to a file, from any thread.

    Raises:
        UserError: the file can't be written, or one of its lines is not a rating.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            sync(path.parent)
            content = path.read_bytes()
            end = content.rfind(b"\n") + 1
            if end < len(content):  # a killed process left a partial line
                os.truncate(path, end)
        except OSError as error:
            raise ConfigError(f"--ratings {path} can't be written: {error.strerror}") from None
        self._ids = {str(rating["id"]) for rating in read_ratings(path)}

    def add(self, rating: Mapping[str, Any], *, supersedes: str | None = None) -> str:
        """Write a rating and return its id once it is on disk.

        Raises:
            DataError: the file can't be written; its content is unchanged.
        """
        now = datetime.now(UTC)
        rating_id = f"{int(now.timestamp() * 1000):012x}{secrets.token_hex(8)}"
        line = {
            "schema": SCHEMA,
            "id": rating_id,
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            **rating,
            "supersedes": supersedes,
        }
        with self._lock:
            self._append(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._ids.add(rating_id)
        return rating_id

    def _append(self, line: bytes) -> None:
        try:
            with self.path.open("ab", buffering=0) as file:
                size, remaining = file.tell(), memoryview(line)
                try:
                    while remaining:  # on a full disk, a write may be partial
                        remaining = remaining[file.write(remaining) :]
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(self.path, size)
                    raise
        except OSError as error:
            raise DataError(f"{self.path} can't be written: {error.strerror}") from None

    def undo(self, rating_id: str, rater: str) -> None:
        """Append a line that revokes a rating.

        Raises:
            KeyError: there is no rating with this id.
            DataError: the file can't be written.
        """
        if rating_id not in self._ids:
            raise KeyError(rating_id)
        self.add({"kind": UNDO, "rater": rater}, supersedes=rating_id)


def read_ratings(path: Path) -> list[Rating]:
    """Read all ratings in a file, including revoked ones.

    Raises:
        DataError: the file can't be read, or a line is not a rating.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{path} can't be read: {reason}") from None
    return list(_parse_lines(path, text))


def _parse_lines(path: Path, text: str) -> Iterator[Rating]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rating = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path} line {number} is not valid JSON: {error.msg}") from None
        if not isinstance(rating, dict) or not {"id", "kind", "schema"} <= rating.keys():
            raise DataError(f"{path} line {number} is not a rating: id, kind or schema is missing")
        yield rating


def active_ratings(ratings: Sequence[Rating]) -> list[Rating]:
    """Return the ratings that no later line revokes or replaces, each id once."""
    revoked = {rating["supersedes"] for rating in ratings if rating.get("supersedes")}
    unique = {str(rating["id"]): rating for rating in ratings if rating["kind"] != UNDO}
    return [rating for key, rating in unique.items() if key not in revoked]


def count_pairs(ratings: Sequence[Rating]) -> int:
    """Return the number of comparisons of two responses, including ties and "both bad"."""
    return sum(rating["kind"] == "pair" for rating in ratings)


def choice_label(pair: Rating) -> str:
    """Return the chosen response's alphabetical rank, "first" or "second", or "" if neither."""
    if pair.get("tie") or pair.get("choice") is None:
        return ""
    texts = [answer["text"] for answer in pair["answers"]]
    return "first" if texts[pair["choice"]] == min(texts) else "second"


def comparison_key(pair: Rating) -> tuple[str, ...]:
    """Return a key made of the dialogue and the two responses in alphabetical order."""
    prompt = [f"{turn['role']}:{turn['content']}" for turn in pair["messages"]]
    return (*prompt, *sorted(answer["text"] for answer in pair["answers"]))


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of `export`."""

    out: Path = Path()
    """Output file; an existing file is replaced."""

    def __post_init__(self) -> None:
        require(self.out != Path(), "--out is missing: pass the file to write")


def main(argv: Sequence[str]) -> None:
    """Run `export`.

    Raises:
        UserError: a file can't be read or written, or contains lines that are not ratings.
    """
    command, *arguments = argv or ["--help"]
    require(command in ("export", "-h", "--help"), f"unknown command {command!r}; usage: {USAGE}")
    export_rows(arguments if command == "export" else ["--help"])


def export_rows(arguments: Sequence[str]) -> None:
    """Write training rows made from ratings files, and print their number."""
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    files = list(arguments[:count])
    about = "Write one row per pair (decided by majority vote), correction and good response."
    config = parse_command(ExportConfig, arguments[count:], usage=USAGE, about=about)
    require(len(files) > 0, f"a ratings file is missing; usage: {USAGE}")
    check_writable(config.out, *files, option="--out")
    ratings = active_ratings([rating for file in files for rating in read_ratings(Path(file))])
    rows, undecided = export(ratings)
    if not rows:
        raise DataError(f"no rating prefers, corrects or approves a response: {', '.join(files)}")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_output({config.out: lines}, option="--out")
    skipped = f"; skipped pairs without a preference: {undecided}" if undecided else ""
    total = f"{counted(len(ratings), 'rating')}, {counted(count_pairs(ratings), 'pair')}"
    print_output(f"{config.out}: {counted(len(rows), 'row')} from {total}{skipped}")


def export(ratings: Sequence[Rating]) -> tuple[list[dict[str, Any]], int]:
    """Return rows for steps 1 and 2, and the number of pairs without a preferred response.

    Rows have prompt, chosen, rejected and margin, the mean strength given by the raters who prefer
    the chosen response; rows of corrections and thumbs-ups have only prompt and chosen.
    """
    votes_by_comparison: defaultdict[tuple[str, ...], list[Rating]] = defaultdict(list)
    for rating in ratings:
        if rating["kind"] == "pair":
            votes_by_comparison[comparison_key(rating)].append(rating)
    rows: list[dict[str, Any]] = []
    for votes in votes_by_comparison.values():
        counts = Counter(choice_label(rating) for rating in votes)
        first, second = counts["first"], counts["second"]
        if first != second:
            label = "first" if first > second else "second"
            rows.append(_pair_row([vote for vote in votes if choice_label(vote) == label]))
    undecided = len(votes_by_comparison) - len(rows)
    for rating in ratings:
        if rating["kind"] == "edit":
            rows.append({"prompt": rating["messages"], "chosen": rating["edit"]})
        elif rating["kind"] == "thumb" and rating.get("choice") == 1:
            text = rating["answers"][0]["text"].strip()
            rows.append({"prompt": rating["messages"], "chosen": text})
    return rows, undecided


def _pair_row(agreeing: Sequence[Rating]) -> dict[str, Any]:
    pair = agreeing[0]
    chosen, rejected = (
        pair["answers"][index]["text"].strip() for index in (pair["choice"], 1 - pair["choice"])
    )
    strengths = [rating["strength"] for rating in agreeing if rating.get("strength")]
    margin = {"margin": sum(strengths) / len(strengths)} if strengths else {}
    return {"prompt": pair["messages"], "chosen": chosen, "rejected": rejected, **margin}


if __name__ == "__main__":
    run_main(main)
