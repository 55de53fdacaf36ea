"""Limits of the service on sizes and durations."""

from __future__ import annotations

from dataclasses import dataclass

from batchwright.limiting.quotas import UNLIMITED, Quotas

DAY = 86_400.0
LONGEST_AGE = LONGEST_WINDOW = 30 * DAY
"""Most seconds to the expiry of a file, and to the end of a batch."""


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Limits of the job service. Times in seconds."""

    max_lines: int = 50_000
    """Most lines of an input file."""
    max_file_bytes: int = 200_000_000
    max_line_bytes: int = 2**20
    """Most bytes of a line, without the newline."""
    file_age: float = LONGEST_AGE
    """Seconds after which a file expires, unless its owner specified otherwise."""
    max_prompts: int = 1000
    """Most prompts of a simple batch."""
    max_completion_window: float = LONGEST_WINDOW
    min_free_disk: int = 0
    """Free bytes on the disk of the data folder that uploads and new batches require."""
    responses: bool = True
    """Whether batches of `/v1/responses` are accepted: not if an endpoint elsewhere that lacks it computes them."""
    default_quotas: Quotas = UNLIMITED
    """Quotas of tenants that have none of their own."""
