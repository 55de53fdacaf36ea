"""Which keys the sequences of a step have in common, so that attention reads them once for all of them.

Sequences that share a prefix have the same blocks at the beginning of their tables. What they share may branch: all
have a system prompt in common, some of them also the examples after it. So the spans form a tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Span:
    """Places `begin` to `end` of the block tables of `sequences`, where these are all alike."""

    sequences: np.ndarray
    """Indices of two sequences or more, ascending."""
    begin: int
    end: int


def shared_spans(tables: np.ndarray, limits: np.ndarray, least: int) -> list[Span]:
    """The spans of `least` blocks or more that several rows of `tables` [S, most blocks] share.

    Only the first `limits` [S] blocks of each row count. Each sequence's spans come in the list one after the other,
    without a gap, the first one from its block 0; what comes after them it has for itself.
    Raises ValueError when `least` is not positive.
    """
    if least < 1:
        raise ValueError(f"least={least}: a span needs at least one block")
    spans: list[Span] = []
    waiting: list[tuple[np.ndarray, int]] = [(np.arange(len(limits)), 0)]
    while waiting:
        members, begin = waiting.pop()
        for alike in _alike(tables, members[limits[members] >= begin + least], begin, begin + least):
            end = _common_end(tables[alike], begin + least, int(limits[alike].min()))
            spans.append(Span(alike, begin, end))
            waiting.append((alike, end))
    return spans


def _alike(tables: np.ndarray, members: np.ndarray, begin: int, end: int) -> Iterable[np.ndarray]:
    """Those of `members` whose tables are the same from `begin` to `end`, wherever that is more than one."""
    groups: dict[bytes, list[int]] = {}
    for index, blocks in zip(members.tolist(), tables[members, begin:end], strict=True):
        groups.setdefault(blocks.tobytes(), []).append(index)
    return (np.array(group) for group in groups.values() if len(group) > 1)


def _common_end(tables: np.ndarray, begin: int, end: int) -> int:
    """Where `tables`, which are the same before `begin`, cease to be so; `end` at the latest."""
    same = (tables[1:, begin:end] == tables[0, begin:end]).all(axis=0)
    return end if same.all() else begin + int(same.argmin())
