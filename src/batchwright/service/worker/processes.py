"""The identity of a worker's process, so that another one on the same machine sees when it has ended.

A process that is killed cannot give back what it holds. Its lease does in the end; but whoever sees that it has ended
need not wait for that. It is seen only where it is certain: on the same boot of the same kernel, in the same namespace
of process ids, of a process with the same id and the same start. All else is left to the lease, which is also what
keeps a result from counting twice if this were ever wrong.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")
_STARTED = 19
"""Place of the start among the fields of `stat` that follow the name."""


def process_name() -> str:
    """Return the name of this process, for people to read."""
    return f"{socket.gethostname()}:{os.getpid()}"


def this_process(proc: Path = _PROC) -> str | None:
    """Return what tells this process from every other one, for `has_ended`; None where the system does not tell."""
    place, started = _place(proc), _started(proc, os.getpid())
    return None if place is None or started is None else f"{place}/{os.getpid()}/{started}"


def has_ended(process: str, proc: Path = _PROC) -> bool:
    """Return whether the process with this identity has ended. False where that cannot be seen from here."""
    place, pid, started = process.rsplit("/", 2)
    if place != _place(proc):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # Another user's, which this may not signal: it is there.
        pass
    found = _started(proc, int(pid))
    return found is not None and found != started


def _place(proc: Path) -> str | None:
    """Return where process ids and their starts mean what they mean here: this boot, and the namespaces of both."""
    try:
        if (proc / "self").readlink() != Path(str(os.getpid())):
            return None  # mounted from another namespace
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        names = ("pid", "time") if (proc / "self/ns/time").is_symlink() else ("pid",)
        return "/".join([boot, *(str((proc / "self/ns" / name).readlink()) for name in names)])
    except OSError:
        return None


def _started(proc: Path, pid: int) -> str | None:
    """Return when a process began, in ticks since the boot; None: it is not there, or is hidden."""
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program is in parentheses and may hold anything, parentheses too.
    return stat.rpartition(")")[2].split()[_STARTED]
