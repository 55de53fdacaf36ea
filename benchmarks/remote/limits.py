"""The limit on open descriptors, of which each call under way takes one."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
