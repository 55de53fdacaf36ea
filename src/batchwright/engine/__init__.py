"""The token-level loop: a model, its KV cache, and the code that runs them."""

import os
import sys

from batchwright.cgroups import threads_for

# OpenMP threads that wait for each other by spinning become very slow when another process wants a core: each of the
# hundreds of barriers in a step then costs a time slice. With this setting they spin briefly, then sleep
# (docs/performance.md has the figures). libgomp reads it when torch is first imported; a value that the user has set is
# left alone.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A container may get less CPU time than the cores that it sees provide: with a thread on each, all of them stand still
# for a part of each tenth of a second.
_cores = len(os.sched_getaffinity(0))
if "OMP_NUM_THREADS" not in os.environ and (_threads := threads_for(_cores)) < _cores:
    os.environ["OMP_NUM_THREADS"] = str(_threads)
    if "torch" in sys.modules and sys.modules["torch"].get_num_threads() > _threads:
        sys.modules["torch"].set_num_threads(_threads)
