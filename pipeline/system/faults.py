"""Faults on demand, for tests: where a process fails, and how.

    FAULT=checkpoint.mid_file:*:2:kill,checkpoint.before_latest:0:1:sleep-200

Each is `<point>:<rank>:<nth>:<action>`: on that rank (`*`: on every one, by the variable RANK), the
nth time the process calls `fault_point(point)`. The actions:

    kill        SIGKILL to the process itself
    exit        end at once with code 1, no clean-up
    hang        sleep for ever, after a line on stderr
    sleep-<ms>  sleep that many milliseconds
    raise       RuntimeError
    enospc      OSError of a full disk
    eio         OSError of a broken disk

Without the variable a point is one comparison.
"""

import errno
import functools
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

from pipeline.system.errors import ConfigError

ENVIRONMENT = "FAULT"

ACTIONS = r"kill|exit|hang|sleep-\d+|raise|enospc|eio"

_text = os.environ.get(ENVIRONMENT)
_visits: Counter[str] = Counter()
_counting = threading.Lock()


@dataclass(frozen=True)
class _Fault:
    point: str
    rank: int | None
    nth: int
    action: str


def fault_point(point: str) -> None:
    """Fail here if `FAULT` has this point.

    Raises:
        ConfigError: `FAULT` can't be read.
        RuntimeError, OSError: the requested fault.
    """
    if _text is None:
        return
    faults = _parse(_text)
    with _counting:
        _visits[point] += 1
        visit = _visits[point]
    rank = int(os.environ.get("RANK", "0"))
    for fault in faults:
        if (fault.point, fault.nth) == (point, visit) and fault.rank in (None, rank):
            _fail(fault)


@functools.cache
def _parse(text: str) -> tuple[_Fault, ...]:
    return tuple(_parse_one(word.strip()) for word in text.split(","))


def _parse_one(word: str) -> _Fault:
    match = re.fullmatch(rf"([^:]+):(\*|\d+):([1-9]\d*):({ACTIONS})", word)
    if match is None:
        raise ConfigError(
            f"{ENVIRONMENT}={word} is not a fault; write <point>:<rank or *>:<nth>:<action>"
        )
    point, rank, nth, action = match.groups()
    return _Fault(point, None if rank == "*" else int(rank), int(nth), action)


def _fail(fault: _Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(1)
        case "hang":
            os.write(sys.stderr.fileno(), f"{fault.point} hangs\n".encode())
            while True:
                time.sleep(3600)
        case "raise":
            raise RuntimeError(f"a fault was asked for at {fault.point}")
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "eio":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        case sleep:
            time.sleep(int(sleep.removeprefix("sleep-")) / 1000)
