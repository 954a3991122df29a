"""Fault injection for tests.

    FAULT=checkpoint.mid_file:*:2:kill,checkpoint.before_latest:0:1:sleep-200

Each fault is `<point>:<rank>:<nth>:<action>`: on that rank (`*`: all ranks), the nth call of
`fault_point(point)` fails. Actions are kill (SIGKILL), hang, sleep-<ms>, and enospc and eio (the
OSError of a full or broken disk).
"""

import errno
import os
import signal
import sys
import threading
import time
from collections import Counter

_faults = [tuple(word.split(":")) for word in os.environ.get("FAULT", "").split(",") if word]
_visits: Counter[str] = Counter()
_lock = threading.Lock()


def fault_point(point: str) -> None:
    """Fail here if `FAULT` names this point and call.

    Raises:
        OSError: the requested fault.
    """
    if not _faults:
        return
    with _lock:
        _visits[point] += 1
        visit = str(_visits[point])
    for name, rank, nth, action in _faults:
        if (name, nth) == (point, visit) and rank in ("*", os.environ.get("RANK", "0")):
            _fail(point, action)


def _fail(point: str, action: str) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.write(sys.stderr.fileno(), f"{point} hangs\n".encode())
            threading.Event().wait()
        case "enospc" | "eio":
            number = getattr(errno, action.upper())
            raise OSError(number, os.strerror(number))
        case sleep:
            time.sleep(int(sleep.removeprefix("sleep-")) / 1000)
