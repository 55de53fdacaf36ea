"""The number of threads that compute in this process of pytest-xdist, set for OpenMP before torch is imported.

The processes share the cores. With a thread for each core in every one of them, each of the hundreds of barriers in a
step would wait for a time slice of another process. Tests of several threads set their number themselves.
"""

import os

_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

if _PROCESSES > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // _PROCESSES)))
