"""How signals end a command: SIGTERM like Ctrl-C, and neither is lost where Python ignores it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN = 0.05
"""Seconds after which an interrupt is repeated that was raised where Python ignores it."""


@dataclass(slots=True)
class Stop:
    """Exit status of a command that was ended by a signal."""

    exit_status: int = 128 + signal.SIGINT


@contextmanager
def terminable() -> Iterator[Stop]:
    """Make SIGTERM end the command as Ctrl-C does; the result gives the exit status.

    An interrupt that comes while Python destroys an object, where exceptions are ignored, is repeated.
    """
    stop = Stop()

    def terminate(number: int, frame: FrameType | None) -> None:
        stop.exit_status = 128 + number
        interrupt = signal.getsignal(signal.SIGINT)
        if not callable(interrupt):
            raise KeyboardInterrupt
        interrupt(signal.SIGINT, frame)

    ignored = sys.unraisablehook
    to_come: list[threading.Timer] = []

    def raise_again(found: UnraisableHookArgs) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt):
            ignored(found)
            return
        # Sent to the main thread, which it wakes if that is waiting for something.
        main = threading.main_thread().ident or 0
        again = threading.Timer(_AGAIN, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        again.start()
        to_come.append(again)

    before = signal.signal(signal.SIGTERM, terminate)
    sys.unraisablehook = raise_again
    try:
        yield stop
    finally:
        sys.unraisablehook = ignored
        for timer in to_come:
            timer.cancel()
        signal.signal(signal.SIGTERM, before)
