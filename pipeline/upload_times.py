"""How long copies of checkpoints from machines' disks took, for the metrics and the report."""

from typing import Any

from pipeline.engine.checkpoint.uploads import Upload


class UploadTimes:
    """Times of the checkpoints that a run has copied to its directory since it was started."""

    def __init__(self) -> None:
        self._uploads: list[Upload] = []
        self._of_line: list[float] = []
        self._held_up: list[float] = []

    def held_up(self, seconds: float) -> None:
        """A save has kept training waiting for so long."""
        self._held_up.append(seconds)

    def add(self, upload: Upload) -> None:
        """A checkpoint is in the run's directory."""
        self._uploads.append(upload)
        self._of_line.append(upload.seconds)

    def since_last_line(self) -> dict[str, float]:
        """`seconds_upload`, where something was copied since the last call."""
        seconds, self._of_line = self._of_line, []
        return {"seconds_upload": sum(seconds)} if seconds else {}

    def in_all(self) -> dict[str, Any]:
        """`uploads` of result.json, where there were any."""
        if not self._uploads:
            return {}
        seconds = [each.seconds for each in self._uploads]
        figures = {
            "count": len(seconds),
            "bytes": sum(each.nbytes for each in self._uploads),
            "seconds": round(sum(seconds), 3),
            "longest": round(max(seconds), 3),
            "held_up": round(sum(self._held_up), 3),
        }
        return {"uploads": figures}
