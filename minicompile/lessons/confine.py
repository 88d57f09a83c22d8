"""What keeps an answer's kernel in its place: limits, no privileges, and Linux's Landlock.

A confined process reads Python, the libraries and this package; it writes into its own folder;
it opens no TCP connection, and signals or traces no process that is not confined with it. So it sees neither
checks and solutions nor caches. Landlock is in Linux since 5.13, TCP since 6.7, signals since 6.12, and needs
no privilege. Where it is missing every file can be read, and what an answer can do then stands in
`notebooks/README.md`.

Source: linux/landlock.h; https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

MOST_MEMORY, MOST_FILE, MORE_PROCESSES = 2**34, 2**30, 512
"""Limits of a kernel: bytes of address space, bytes of a file, more processes and threads than there are."""

CHILD_SUBREAPER, DUMPABLE, NO_NEW_PRIVILEGES, DROP_CAPABILITY = 36, 4, 38, 24
"""Operations of prctl: adopt orphans; may others of the user trace; exec gains nothing; drop a capability."""

CAP_SYS_PTRACE = 19
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls, whose numbers are the same on every architecture."""

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, IOCTL_DEV = 1, 2, 4, 8, 1 << 15
ACCESSES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""The rights on files that each version of Landlock knows, by the first version that knows them."""

READ = EXECUTE | READ_FILE | READ_DIR
DEVICES = READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEV
ON_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | IOCTL_DEV


def prctl(operation: int, value: int) -> None:
    """Ask Linux for an operation on this process; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(operation, value, 0, 0, 0)


def guard_self() -> None:
    """No process of the same user may trace this one or open its descriptors; orphans below it stay its own.

    Programs that root starts from here get no exemption from that.
    """
    prctl(CHILD_SUBREAPER, 1)
    prctl(DUMPABLE, 0)
    prctl(DROP_CAPABILITY, CAP_SYS_PTRACE)


def confine(readable: Sequence[str], writable: Sequence[str], seconds: float) -> None:
    """Give up privileges, set limits, and let this process read and write these folders alone.

    With nothing to read, Landlock stays off.
    """
    prctl(DUMPABLE, 1)
    set_limits(seconds)
    if sys.platform == "linux":
        header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
        ctypes.CDLL(None).capset(header, none)
        prctl(NO_NEW_PRIVILEGES, 1)
        shut_in(readable, writable)


def set_limits(seconds: float) -> None:
    """Limit memory, files, processor time and processes of this process and those that it starts."""
    processor, threads = int(seconds * (os.cpu_count() or 1)) + 120, 0
    with contextlib.suppress(OSError):  # "0.5 0.4 0.3 2/700 1234": 700 threads there are
        threads = int(Path("/proc/loadavg").read_text().split()[3].split("/")[1])
    for limit, most in (
        (resource.RLIMIT_AS, MOST_MEMORY),
        (resource.RLIMIT_FSIZE, MOST_FILE),
        (resource.RLIMIT_CPU, processor),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, MORE_PROCESSES + threads),
    ):
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))


# ------------------------------------------------------------------------------------------- Landlock


def landlock_version() -> int:
    """Which Landlock this Linux has; 0 for none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1)))


def shut_in(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Restrict this thread, and what it starts, to folders. Raises OSError if Landlock refuses."""
    version = landlock_version()
    if not version or not readable:
        return
    files = ACCESSES[max(first for first in ACCESSES if first <= version)]
    network, scope = 3 * (version >= 4), 3 * (version >= 6)
    libc = ctypes.CDLL(None, use_errno=True)
    attribute = struct.pack("QQQ", files, network, scope)[
        : 8 if version < 4 else 16 + 8 * (scope > 0)
    ]
    rules = libc.syscall(CREATE_RULESET, attribute, ctypes.c_size_t(len(attribute)), 0)
    allowed = [(path, READ) for path in (*readable, "/proc", "/sys")]
    allowed += [("/dev", DEVICES), *((path, files) for path in writable)]
    for path, access in allowed:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            fits = access & files & (-1 if os.path.isdir(path) else ON_A_FILE)
            rule = struct.pack("=Qi", fits, descriptor)
            libc.syscall(ADD_RULE, rules, 1, rule, 0)
            os.close(descriptor)
    if rules < 0 or libc.syscall(RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock did not confine the kernel")
    os.close(rules)


def all_but(folder: Path, hidden: Path) -> list[str]:
    """Folders and files that together are all of a folder but for one below it."""
    if not hidden.is_relative_to(folder):
        return [str(folder)]
    parts = [] if folder == hidden else sorted(folder.iterdir())
    return [path for part in parts for path in all_but(part, hidden)]


def readable(hidden: Path) -> list[str]:
    """What an answer needs to read: this package, Python and the system; but nothing in `hidden`, apart from
    what was saved on a GPU."""
    tops = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    tops |= {Path("/", name).resolve() for name in "bin etc lib lib64 opt sbin usr".split()}  # noqa: SIM905
    tops.add(Path(__file__).resolve().parents[1])
    paths = (path for top in sorted(tops) if top.exists() for path in all_but(top, hidden))
    return [str(hidden / "gpu"), *paths]


# ------------------------------------------------------------------------------------------- processes


def kill_descendants() -> None:
    """Kill every process below this one, which adopts what its children leave behind (`guard_self`)."""
    for _ in range(1000):
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parent = path.read_text(encoding="latin-1").rpartition(")")[2].split()[1]
                if int(parent) == os.getpid():
                    os.kill(int(path.parent.name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)
