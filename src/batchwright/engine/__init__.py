"""The token-level loop: a model, its KV cache, and what runs them."""

import os

# OpenMP threads that wait for each other by spinning collapse when another process wants a core: each of the hundreds
# of barriers in a step then costs a time slice. After this short spin they sleep instead (docs/performance.md has the
# figures). libgomp reads it when torch is first imported; what the user has set is left alone.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
