"""Answers of endpoints on disk, by hash of the request: none is asked for twice."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


class Answers:
    """Files by the hash of what was asked, in a directory that several processes share.

    Args:
        directory: where; None keeps nothing.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def get(self, request: object) -> Any | None:  # noqa: ANN401
        """The answer to an equal request; None where there is none, or its file is damaged."""
        path = self._path(request)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def put(self, request: object, answer: object) -> None:
        """Keep an answer; a process that is killed meanwhile leaves no part of it."""
        path = self._path(request)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(answer, file)
        Path(name).replace(path)

    def _path(self, request: object) -> Path | None:
        if self._directory is None:
            return None
        text = json.dumps(request, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        return self._directory / name[:2] / f"{name}.json"
