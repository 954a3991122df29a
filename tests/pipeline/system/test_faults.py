"""Fault injection at a requested point."""

import subprocess
import sys

import pytest

from pipeline.system import faults
from pipeline.system.faults import fault_point
from tests.sources import ROOT


def inject_faults(monkeypatch: pytest.MonkeyPatch, text: str, *, rank: int = 0) -> None:
    monkeypatch.setattr(faults, "_faults", [tuple(w.split(":")) for w in text.split(",")])
    monkeypatch.setenv("RANK", str(rank))
    faults._visits.clear()


def run(fault: str, *, rank: int = 0) -> int:
    """Return the exit code of a process that reaches point `a` twice."""
    program = "from pipeline.system.faults import fault_point; fault_point('a'); fault_point('a')"
    environment = {"FAULT": fault, "RANK": str(rank)}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, check=False
    ).returncode


def test_kill_and_exit_apply_to_the_given_rank_and_visit() -> None:
    assert run("a:0:2:kill") == -9
    assert run("a:*:1:exit", rank=3) == 1
    assert run("a:1:1:kill,a:0:3:kill,b:0:1:kill") == 0


def test_errors_are_raised_at_the_given_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    inject_faults(monkeypatch, "a:1:2:enospc,b:*:1:eio,c:*:1:raise", rank=1)

    fault_point("a")
    with pytest.raises(OSError, match="No space left on device"):
        fault_point("a")
    fault_point("a")
    with pytest.raises(OSError, match="Input/output error"):
        fault_point("b")
    with pytest.raises(RuntimeError, match="a fault was requested at c"):
        fault_point("c")
