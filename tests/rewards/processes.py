"""Find the processes that reward sources start."""

import psutil


def worker_processes() -> list[psutil.Process]:
    """Return the supervisors of reward workers and all their descendants."""
    supervisors = [
        process
        for process in psutil.Process().children()
        if any("workers.supervise" in word for word in command_line(process))
    ]
    return [*supervisors, *(p for s in supervisors for p in s.children(recursive=True))]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
