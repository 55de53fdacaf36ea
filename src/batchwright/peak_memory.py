"""Peak memory use of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    # On Linux `ru_maxrss` starts from that of the parent process.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
