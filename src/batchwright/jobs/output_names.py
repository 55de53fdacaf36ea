"""Names of the files that a run has beside its output: that of the output, and a suffix."""

from __future__ import annotations

from batchwright.durable_files import TEMPORARY

STATE = ".batchwright.json"
"""Suffix of the state of the job, with its lock."""
SPENT = ".spend"
"""Suffix of the journal of what was paid."""
BATCHES = ".batches"
"""Suffix of the folder with the journal of batches at a provider."""
LINES = ".partial"
"""Suffix of results as they finish, of an output of lines that is written at the end."""
ROWS = ".results.jsonl"
"""Suffix of results as they finish, of a table."""
INPUT = ".input"
"""Suffix of the content of a stream."""
MAKING = ".making"
"""Suffix of an output elsewhere, or of a part of one, that is being made."""
EPOCH = ".epoch"
"""Suffix of the token of the run that wrote results which are copied elsewhere."""
LEASE = ".lease"
"""Suffix of the token of the run that holds the lease of an output elsewhere."""
_SUFFIXES = (STATE, SPENT, BATCHES, LINES, ROWS, INPUT + TEMPORARY, MAKING, EPOCH, LEASE, TEMPORARY)


def is_own_name(name: str, output: str) -> bool:
    """Return whether `name` is that of `output`, or of a file that a run has beside it, whatever follows its suffix."""
    # `reviews.input.jsonl` is no file of the output `reviews`.
    return name in (output, output + INPUT) or any(name.startswith(output + suffix) for suffix in _SUFFIXES)
