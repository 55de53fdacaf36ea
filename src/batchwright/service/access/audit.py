"""The audit log: who did what to which object, as lines of JSON, with one file per day (UTC).

A thread writes the lines, so that no request waits for the disk: all waiting lines in one `write` under a lock of the
file, to which several processes append, followed by `fdatasync`. A crash loses the lines of the last moment.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

from batchwright.service.files.durable import give_to_owner, make_folder

_log = logging.getLogger(__name__)
_MOST_WAITING = 10_000
"""Most lines that wait for a disk that does not answer; further ones are counted and not written."""
_SUFFIX = ".jsonl"

Event: TypeAlias = dict[str, Any]


class AuditLog:
    """Audit log of one data folder. `record` may be called from any thread."""

    def __init__(self, folder: Path, *, retention: int, now: Callable[[], float] = time.time) -> None:
        """`retention`: days kept besides the current one; 0: nothing is written. `now` gives Unix seconds."""
        self._folder = folder
        self._retention = retention
        self._now = now
        self._waiting: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._lost = 0
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def record(self, action: str, outcome: str, **details: Any) -> None:
        """Queue a line to be written soon. Details that are None are left out."""
        if not self._retention:
            return
        if self._waiting.qsize() >= _MOST_WAITING:
            self._lost += 1
            return
        self._waiting.put(self._event(action, outcome, details))
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
                self._thread.start()

    def write(self, action: str, outcome: str, **details: Any) -> None:
        """Write a line now. Raises `OSError`."""
        if self._retention:
            self._append([self._event(action, outcome, details)])

    def close(self) -> None:
        """Write the waiting lines, and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def remove_old(self) -> list[date]:
        """Remove the files of days that are no longer kept, and return the days."""
        if not self._retention or not self._folder.is_dir():
            return []
        first = datetime.fromtimestamp(self._now(), UTC).date() - timedelta(days=self._retention)
        removed = []
        for path in self._folder.iterdir():
            with suppress(ValueError, FileNotFoundError):  # not a log file; removed by another process
                day = date.fromisoformat(path.name.removesuffix(_SUFFIX))
                if path.suffix == _SUFFIX and day < first:
                    path.unlink()
                    removed.append(day)
        return removed

    def _event(self, action: str, outcome: str, details: Mapping[str, Any]) -> Event:
        at = datetime.fromtimestamp(self._now(), UTC).isoformat(timespec="milliseconds")
        given = {name: value for name, value in details.items() if value is not None}
        return {"at": at, "action": action, "outcome": outcome, **given}

    def _write_all(self) -> None:
        open_ = True
        while open_:
            group = [self._waiting.get()]
            group += [self._waiting.get() for _ in range(self._waiting.qsize())]
            events = [event for event in group if event is not None]
            open_ = len(events) == len(group)
            lost, self._lost = self._lost, 0
            notice = [self._event("audit.lost", "failed", {"lines": lost})] if lost else []
            try:
                self._append([*events, *notice])
            except OSError as error:
                self._lost += lost + len(events)
                _log.error("audit: %d lines could not be written: %s", len(events), error)

    def _append(self, events: Iterable[Event]) -> None:
        days: dict[str, list[Event]] = {}
        for event in events:
            days.setdefault(event["at"][:10], []).append(event)
        if days:
            make_folder(self._folder)
        for day, of_day in days.items():
            # In ASCII, since details may quote text that has no UTF-8 form.
            lines = "".join(json.dumps(event, separators=(",", ":"), default=str) + "\n" for event in of_day)
            _append_whole(self._folder / f"{day}{_SUFFIX}", lines.encode())


def operator() -> Event:
    """Return the user and the machine of this command line."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = str(os.getuid())
    return {"operator": name, "host": socket.gethostname()}


def _append_whole(path: Path, content: bytes) -> None:
    """Append all of `content` to a file, or nothing, so that a full disk leaves no partial line. Raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_to_owner(descriptor, path.parent)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if os.write(descriptor, content) < len(content):
            os.ftruncate(descriptor, size)
            raise OSError(f"{path} does not take {len(content)} bytes: make room on its disk")
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
