"""Limits that control groups set on this process, which even in a container sees the whole machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_TABLE = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60
"""Number of bytes from which version 1 means that there is no limit."""


def memory_left(table: Path = _TABLE, mount: Path = _MOUNT) -> int | None:
    """Return how many bytes the process may still take, by the tightest of its groups; None if none limits it.

    `table` is its `/proc/PID/cgroup`, `mount` the folder of the file systems of groups. Pages of files count as free,
    as in the kernel's own figure for the machine.
    """
    left = []
    for folder in _groups("", table, mount):
        limit = _number(folder / "memory.max")
        if limit is not None:
            cached = sum(_figures(folder / "memory.stat").get(f"{name}_file", 0) for name in ("active", "inactive"))
            left.append(limit - (_number(folder / "memory.current") or 0) + cached)
    for folder in _groups("memory", table, mount):
        limit = _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < _NO_LIMIT:
            stat = _figures(folder / "memory.stat")
            cached = sum(stat.get(f"total_{name}_file", 0) for name in ("active", "inactive"))
            left.append(limit - (_number(folder / "memory.usage_in_bytes") or 0) + cached)
    return max(0, min(left)) if left else None


def cpu_quota(table: Path = _TABLE, mount: Path = _MOUNT) -> float | None:
    """Return how many processors the process may keep busy, by the tightest of its groups; None if none limits it."""
    quotas = []
    for folder in _groups("", table, mount):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    for folder in _groups("cpu", table, mount):
        given, per = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if given is not None and per:
            quotas.append(given / per)
    return min(quotas, default=None)


def free_memory() -> int:
    """Return how many bytes this process may still take of the memory of the machine."""
    import psutil

    free = int(psutil.virtual_memory().available)
    left = memory_left()
    return free if left is None else min(free, left)


def threads_for(cores: int, sharing: int = 1) -> int:
    """Return how many threads can compute on `cores` all the time, where `sharing` processes share the quota."""
    quota = cpu_quota()
    return cores if quota is None else min(cores, max(1, int(quota / sharing)))


def _groups(controller: str, table: Path, mount: Path) -> Iterator[Path]:
    """The folders of a controller's groups, from the process's own to the topmost; `""`: those of version 2.

    In a container the table may name a path on the host, of which only the topmost folder is mounted.
    """
    for line in _text(table).splitlines():
        fields = line.split(":", 2)
        if len(fields) < 3 or controller not in fields[1].split(","):
            continue
        tops = [mount / fields[1], mount / controller] if controller else [mount, mount / "unified"]
        sign = "" if controller else "cgroup.controllers"
        top = next((each for each in tops if (each / sign).exists()), None)
        if top is not None:
            names = [name for name in fields[2].split("/") if name not in ("", "..")]
            yield from (top.joinpath(*names[:count]) for count in range(len(names), -1, -1))
        return


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None for a word such as `max`, a negative number, or no file."""
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _figures(path: Path) -> dict[str, int]:
    """The numbers by name in a file of lines such as `inactive_file 4096`."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
