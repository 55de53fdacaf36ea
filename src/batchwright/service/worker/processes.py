"""Identity of a worker's process, by which another process on the same machine can tell that it has ended.

A killed process cannot give back its lines. They become free when its lease runs out, but a process that knows of its
end need not wait for that. This is known only on the same boot of the same kernel, in the same namespace of process
ids, by the process id and its start time. Everything else is left to the lease, which also keeps a result from counting
twice if this were ever wrong.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")
_STARTED = 19
"""Index of the start time among the fields of `stat` after the name."""


def process_name() -> str:
    """Return the name of this process, for people to read."""
    return f"{socket.gethostname()}:{os.getpid()}"


def this_process(proc: Path = _PROC) -> str | None:
    """Return the unique identity of this process, for `has_ended`; None where the system does not show it."""
    place, started = _place(proc), _started(proc, os.getpid())
    return None if place is None or started is None else f"{place}/{os.getpid()}/{started}"


def has_ended(process: str, proc: Path = _PROC) -> bool:
    """Return whether the process with this identity is known to have ended."""
    place, pid, started = process.rsplit("/", 2)
    if place != _place(proc):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists and belongs to another user
    found = _started(proc, int(pid))
    return found is not None and found != started


def _place(proc: Path) -> str | None:
    """Return the scope in which process ids and start times are comparable: this boot, and the namespaces of both."""
    try:
        if (proc / "self").readlink() != Path(str(os.getpid())):
            return None  # mounted from another namespace
        boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
        names = ("pid", "time") if (proc / "self/ns/time").is_symlink() else ("pid",)
        return "/".join([boot, *(str((proc / "self/ns" / name).readlink()) for name in names)])
    except OSError:
        return None


def _started(proc: Path, pid: int) -> str | None:
    """Return when a process started, in ticks since the boot; None: it does not exist, or is hidden."""
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program is in parentheses and may contain parentheses.
    return stat.rpartition(")")[2].split()[_STARTED]
