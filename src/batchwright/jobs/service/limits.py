"""How large things may be, and how long they may take."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.limiting.quotas import UNLIMITED, Quotas

DAY = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of the job service. Sizes in bytes, times in seconds."""

    max_lines: int = 50_000
    """Of an input file."""
    max_file_bytes: int = 200_000_000
    max_line_bytes: int = 2**20
    """Without the newline."""
    upload_stall: float = 60.0
    """For which an upload may bring nothing."""
    upload_time: float = 6 * 3600.0
    """For which an upload may go on."""
    file_age: float = 30 * DAY
    """After which a file expires, where its owner did not say."""
    max_prompts: int = 1000
    """Of a simple batch."""
    max_completion_window: float = 30 * DAY
    min_free_disk: int = 0
    """Bytes that the disk of the data folder must have free for uploads and new batches."""
    default_quotas: Quotas = UNLIMITED
    """Of tenants that have none of their own."""
