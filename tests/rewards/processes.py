"""The processes that rewards start, as tests look at them."""

import psutil


def descendants() -> list[psutil.Process]:
    """The processes of rewards; the test run has others, which other tests started."""
    own = [
        each
        for each in psutil.Process().children()
        if any("workers.supervise" in word for word in read_command(each))
    ]
    return [process for each in own for process in (each, *each.children(recursive=True))]


def read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
