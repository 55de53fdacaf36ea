"""Signals that end a command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from batchwright.cli.interrupts import Stop, terminable


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


class Interrupted:
    """An object in whose destruction Ctrl-C is pressed."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def destroy() -> None:
    interrupted = Interrupted()
    del interrupted


def ended_by(act: Callable[[], None]) -> Stop:
    """Wait for a signal after `act` in a command that can be terminated, and return how it ended."""
    stop = Stop()
    try:
        with terminable() as stop:
            act()
            signal.pause()
    except KeyboardInterrupt:
        return stop
    raise AssertionError("no interrupt came")


def test_an_interrupt_in_a_destructor_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    hook = sys.unraisablehook
    assert ended_by(destroy).exit_status == 130
    assert sys.unraisablehook is hook
    assert capfd.readouterr().err == ""


def test_sigterm_ends_as_ctrl_c_does_with_a_status_of_its_own() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert ended_by(lambda: os.kill(os.getpid(), signal.SIGTERM)).exit_status == 143
    assert signal.getsignal(signal.SIGTERM) == before
