"""Progress of long operations in the log."""

import pytest

from pipeline.system.logs import log_progress


def test_long_operation_logs_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert list(log_progress([7, 8, 9], "rows", interval=0.0)) == [7, 8, 9]

    assert [line[:8] for line in caplog.messages] == ["rows 1/3", "rows 2/3"]
