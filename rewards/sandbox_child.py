"""The inner part of the sandbox: applies the kernel's limits, then starts the program.

Runs as a separate script, `python -I -S sandbox_child.py JOB STATUS`, since a process that may have
threads can't safely run Python between fork and exec. JOB and STATUS are file descriptors: JOB
contains the settings; STATUS receives an error message, or is closed once the sandbox is built.

There are four processes, each waiting for the next: this one, outside the namespaces; a member of
the new namespaces; their init process, whose exit kills all others in them; and the program.

The script runs for every program; importing json or signal would double its startup time.
"""

import ctypes
import marshal
import os
import resource
import sys

NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Mount, UTS, IPC, user, PID and network namespaces: flags from linux/sched.h."""

NOBODY = 65534

SIGKILL = 9
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
"""System call numbers, which are the same on all architectures."""

AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = -100, 0x8000, 1
LANDLOCK_VERSION, LANDLOCK_PATH_BENEATH = 1, 1
READ, READ_WRITE = 0b1101, 0b111
"""Landlock rights. READ: execute, read, list directories; READ_WRITE: execute, write, read."""

ACCESS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of access rights in each version of Landlock; versions 5 and above have 16."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Build the sandbox, run the program in it and exit with its exit code."""
    job_descriptor, status = map(int, sys.argv[1:])
    with os.fdopen(job_descriptor, "rb") as file:
        job = marshal.load(file)
    os.set_inheritable(status, False)
    try:
        _die_with_parent(job["parent"])
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        code = _run_isolated(job, status) if job["isolated"] else _run(job, status)
    except OSError as error:
        _report(status, error)
        code = 1
    _kill_orphans()
    os._exit(code)


def check_syscall(name: str, result: int) -> int:
    """Return the result of a system call; raise an `OSError` that names the call if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        check_syscall("prctl", libc.prctl(option, value, 0, 0, 0))


def _report(status: int, error: OSError) -> None:
    os.write(status, f"{error.filename or 'system call'}: {error.strerror}".encode())


def _die_with_parent(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_isolated(job: dict, status: int) -> int:
    """Run the program in new namespaces, whose user ids this process maps; return its exit code."""
    parent, unshared, mapped = os.getpid(), os.pipe(), os.pipe()
    member = os.fork()
    if member == 0:
        try:
            _die_with_parent(parent)
            check_syscall("unshare", libc.unshare(NEW_NAMESPACES))
            os.write(unshared[1], b"!")
            os.close(mapped[1])
            code = _run(job, status) if os.read(mapped[0], 1) else 1
        except OSError as error:
            _report(status, error)
            code = 1
        os._exit(code)
    os.close(unshared[1])
    if os.read(unshared[0], 1):
        _map_users(member)
        os.write(mapped[1], b"!")
    os.close(status)
    return _exit_code(os.waitpid(member, 0)[1])


def _map_users(member: int) -> None:
    """Map the namespace's nobody to this user; for root, map root and nobody to themselves."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        # RLIMIT_NPROC does not apply to root, so the program runs as nobody.
        users = groups = f"0 0 1\n{NOBODY} {NOBODY} 1"
    else:
        _write(f"/proc/{member}/setgroups", "deny")
        users, groups = f"{NOBODY} {user} 1", f"{NOBODY} {group} 1"
    _write(f"/proc/{member}/uid_map", users)
    _write(f"/proc/{member}/gid_map", groups)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


def _run(job: dict, status: int) -> int:
    """Start the namespace's init process and wait for it; return its exit code."""
    reader, writer = os.pipe()
    init = os.fork()
    if init:
        os.close(status)
        return _exit_code(os.waitpid(init, 0)[1])
    os.close(writer)
    try:
        _prctl(PR_SET_PDEATHSIG, SIGKILL)
        os.set_blocking(reader, False)
        try:
            os.read(reader, 1)  # returns if the parent has already exited
            os._exit(1)
        except BlockingIOError:
            os.close(reader)
        _prepare(job)
        program = os.fork()
        if program == 0:
            _exec_program(job)
        os.close(status)
        while True:  # orphans of the program also become children of this process
            pid, wait_status = os.wait()
            if pid == program:
                os._exit(_exit_code(wait_status))
    except OSError as error:
        _report(status, error)
    os._exit(1)


def _kill_orphans() -> None:
    """Kill the program's remaining processes; the kernel kills them only in namespaces."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as children:  # noqa: PTH123
                for child in children.read().split():
                    os.kill(int(child), SIGKILL)
            os.wait()
        except OSError:  # no children, or the system can't list them
            return


def _exit_code(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _prepare(job: dict) -> None:
    """Write the program's files to an empty directory; if isolated, the rest is read-only."""
    directory = job["directory"]
    if job["isolated"]:
        _write("/proc/sys/user/max_user_namespaces", "0")
        check_syscall("mount", libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        _make_read_only(b"/")
        options = f"size={job['disk_mb']}m,mode=755".encode()
        mount_point = job["mount_point"].encode()
        check_syscall(
            "mount", libc.mount(b"tmpfs", mount_point, b"tmpfs", MS_NOSUID | MS_NODEV, options)
        )
        # Mount at a path the program's user can access; home directories may be private.
        python = job["python"].encode()
        os.mkdir(python)  # noqa: PTH102 - importing pathlib takes as long as the rest
        check_syscall(
            "mount", libc.mount(job["prefix"].encode(), python, None, MS_BIND | MS_REC, None)
        )
        _make_read_only(python)
        os.mkdir(directory)  # noqa: PTH102
        os.chown(directory, NOBODY, NOBODY)
    os.chdir(directory)
    for name, text in job["files"].items():
        with open(name, "w", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            file.write(text)


def _make_read_only(path: bytes) -> None:
    """Make a path's mount and all mounts below it read-only."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, 32)
    check_syscall("mount_setattr", result)


def _exec_program(job: dict) -> None:
    """Replace this process with the program."""
    if job["isolated"]:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        _restrict_files(job["readable"], job["directory"])
    _set_limits(job)
    os.execve(job["command"][0], job["command"], job["environment"])


def _restrict_files(readable: list[str], directory: str) -> None:
    """Restrict file access with Landlock to the program's directory and, for reading, Python's."""
    version = check_syscall("landlock", libc.syscall(LANDLOCK_CREATE, None, 0, LANDLOCK_VERSION))
    all_rights = (1 << ACCESS_BY_VERSION.get(version, 16)) - 1
    handled = ctypes.c_uint64(all_rights)
    rules = check_syscall("landlock", libc.syscall(LANDLOCK_CREATE, ctypes.byref(handled), 8, 0))
    allowed = [(path, READ) for path in readable]
    allowed += [(directory, all_rights), ("/dev/null", READ_WRITE), ("/dev/urandom", 0b100)]
    for path, access in allowed:
        try:
            descriptor = os.open(path, os.O_PATH)
        except FileNotFoundError:
            continue
        rights = access if os.path.isdir(path) else access & READ_WRITE  # noqa: PTH112
        rule = rights.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
        check_syscall("landlock", libc.syscall(LANDLOCK_ADD, rules, LANDLOCK_PATH_BENEATH, rule, 0))
        os.close(descriptor)
    check_syscall("landlock", libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def _set_limits(job: dict) -> None:
    """Limit the resources of each process of the program."""
    memory = job["memory_mb"] << 20
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: job["disk_mb"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if job["isolated"]:
        # Otherwise the limit would count all processes of the user.
        limits[resource.RLIMIT_NPROC] = job["processes"]
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
