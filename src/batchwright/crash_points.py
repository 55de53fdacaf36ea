"""Named places at which a test can kill the process, to show that what was acknowledged survives.

With `BATCHWRIGHT_CRASH_AT=store.after_commit:3` in its environment the process kills itself with SIGKILL when it passes
the place of that name for the third time (without a number: the first). Without the variable nothing happens. It is
read once, when this module is imported.
"""

from __future__ import annotations

import os
import signal
import threading

_name, _, _count = os.environ.get("BATCHWRIGHT_CRASH_AT", "").partition(":")
_left = int(_count or 1)
_lock = threading.Lock()


def crash_point(name: str) -> None:
    """Kill the process if this is the place that the environment names; otherwise do nothing."""
    global _left
    if name != _name:
        return
    with _lock:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
