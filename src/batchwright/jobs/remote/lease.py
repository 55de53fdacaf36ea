"""Leases of outputs at addresses: one run at a time writes one, and a run that has lost it commits nothing more."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from batchwright.clock import Clock, MonotonicClock
from batchwright.durable_files import replacing
from batchwright.errors import ResumeRefused
from batchwright.jobs.remote.remote_file import RemotePath

LEASE_SECONDS = 60.0
"""Time without a renewal after which the run that holds a lease counts as dead. It is renewed after a quarter of it."""
_NAME = re.compile(r"_lease-(\d{6,})\.json")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """The run that holds an output."""

    token: str
    host: str
    process: int
    since: float
    """Seconds since 1970, by the clock of that machine."""
    renewed: float
    """When it last said that it lives, likewise."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {_time_of_day(self.since)}"

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> Holder | None:
        """The holder that `encode` wrote; None for anything else."""
        try:
            fields = json.loads(content)
            names = (str(fields["token"]), str(fields["host"]), int(fields["process"]))
            return cls(*names, float(fields["since"]), float(fields["renewed"]))
        except (ValueError, KeyError, TypeError):
            return None

    def is_dead(self, now: float, unchanged: float) -> bool:
        """Whether this run counts as dead at `now`, its lease having been seen `unchanged` for so many seconds.

        What it wrote is compared with the clock of another machine, so that is believed only twice as late.
        """
        return unchanged >= LEASE_SECONDS or now - self.renewed >= 2 * LEASE_SECONDS


def lease_name(attempt: int) -> str:
    """The name of the lease of an attempt, in the folder of the output."""
    return f"_lease-{attempt:06}.json"


def attempts_in(names: Iterable[str]) -> list[int]:
    """The attempts of which there are leases among the names of files, in their order."""
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


class OutputLease:
    """The right of one run to write an output.

    Attempts are numbered, and the lease of each is a file of its own, made by a write that fails if the file is there,
    where the store has one, and read again anyway. The highest number holds the output, and only its owner writes its
    file again. A lease is removed when it ends, or by a higher one. So nobody who has an older number, however long it
    slept, finds its lease in the folder as the highest: it has lost.
    """

    def __init__(
        self,
        folder: RemotePath,
        note: Path,
        *,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`note`: file on this machine with the token of the run that holds or held the lease from here.

        The caller has locked the place of the note, so a run whose token is in it has ended.
        """
        self._folder = folder
        self._note = note
        self._clock = clock or MonotonicClock()
        self._wall = wall
        self._pause = pause
        self.attempt = 0
        """Number of the lease; 0 while there is none."""
        self._mine = Holder(secrets.token_hex(8), socket.gethostname(), os.getpid(), 0.0, 0.0)
        self._lost: ResumeRefused | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, after: int) -> None:
        """Take the lease, with a number above `after`. Raises OSError, `ResumeRefused` if another run is alive.

        A run that was killed on another machine is waited for, until it counts as dead.
        """
        seen: tuple[int, bytes] | None = None
        seen_at = 0.0
        while True:
            attempts = attempts_in(self._folder.listed())
            highest = max(attempts, default=0)
            content = (self._folder / lease_name(highest)).read_bytes() if highest else None
            holder = None if content is None else Holder.decode(content)
            if holder is not None and content is not None and holder.token != self._noted():
                is_news = seen is None
                if seen is None:
                    seen, seen_at = (highest, content), self._clock.now()
                elif seen != (highest, content):
                    raise ResumeRefused(
                        f"another run is writing {self._folder}: {holder}. Wait for it, or end it, then run the same "
                        "command again; or name another output"
                    )
                unchanged = self._clock.now() - seen_at
                if not holder.is_dead(self._wall(), unchanged):
                    if is_news:
                        _log.warning(
                            "%s is held by another run (%s); whether it is alive is known in %.0f s at most",
                            self._folder,
                            holder,
                            LEASE_SECONDS,
                        )
                    self._pause(min(LEASE_SECONDS / 12, LEASE_SECONDS - unchanged))
                    continue
            if self._made(max(highest, after) + 1):
                break
        for attempt in attempts:
            with suppress(OSError):  # the next one removes it
                (self._folder / lease_name(attempt)).remove()

    def _made(self, attempt: int) -> bool:
        """Whether the lease with that number could be had."""
        now = self._wall()
        mine = replace(self._mine, since=now, renewed=now)
        self._note.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._note) as file:
            file.write(mine.token.encode())
        place = self._folder / lease_name(attempt)
        place.create(mine.encode())
        # Some stores do not know the condition, and a request that was repeated met what it had made itself.
        if self._token_in(place) != mine.token:
            return False
        if self._highest() > attempt:
            place.remove()
            return False
        self.attempt, self._mine = attempt, mine
        return True

    def keep(self) -> None:
        """Renew it from now on, in a thread, until `release`."""
        self._thread = threading.Thread(target=self._renewing, name="batchwright-lease", daemon=True)
        self._thread.start()

    def _renewing(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / 4):
            try:
                self.renew()
            except ResumeRefused:
                return
            except Exception:  # the next commit meets it too, and ends the run
                _log.debug("the lease of %s could not be renewed", self._folder, exc_info=True)

    def renew(self) -> None:
        """Make sure that this run holds the output, and say that it lives. Raises OSError, `ResumeRefused`."""
        with self._lock:
            if self._ended.is_set():
                return
            if self._lost is None:
                place = self._folder / lease_name(self.attempt)
                highest = self._highest()
                if highest <= self.attempt and self._token_in(place) == self._mine.token:
                    self._mine = replace(self._mine, renewed=self._wall())
                    place.write_bytes(self._mine.encode())
                    return
                content = (self._folder / lease_name(highest)).read_bytes() if highest else None
                self._lost = self.lost_to(None if content is None else Holder.decode(content))
            raise self._lost

    def lost_to(self, holder: object) -> ResumeRefused:
        """The error of a run that has lost the output, `holder` being who has it, if that is known."""
        return ResumeRefused(
            f"another run has taken over {self._folder} ({holder or 'it has ended'}), since this one was not heard of "
            f"for {LEASE_SECONDS:.0f} s: nothing more is written. The same command goes on when the other has ended"
        )

    def release(self) -> None:
        """Give it up, if it is held. Safe to call twice."""
        self._ended.set()
        with self._lock:
            if self.attempt and self._lost is None:
                place = self._folder / lease_name(self.attempt)
                with suppress(OSError):  # the next run on this machine knows it, and others wait a minute
                    if self._token_in(place) == self._mine.token:
                        place.remove()
                        self._note.unlink(missing_ok=True)
            self.attempt = 0
        if self._thread is not None:
            self._thread.join()

    def _highest(self) -> int:
        return max(attempts_in(self._folder.listed()), default=0)

    def _token_in(self, place: RemotePath) -> str | None:
        content = place.read_bytes()
        holder = None if content is None else Holder.decode(content)
        return None if holder is None else holder.token

    def _noted(self) -> str | None:
        try:
            return self._note.read_text()
        except OSError:
            return None


def _time_of_day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
