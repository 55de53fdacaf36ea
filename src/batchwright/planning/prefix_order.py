"""The order in which lines are sent so that a prompt cache finds what several of them have in common."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeAlias, TypeVar

_Item = TypeVar("_Item")

MOST_LINES, MOST_BYTES = 4096, 2**24
"""Lines of a window, and their bytes, by default."""

LEAST_SHARED = 4096
"""Bytes from which a common prefix is worth something: about 1,024 tokens, the least that OpenAI caches."""
_STEP = 512
"""Bytes in multiples of which a longer prefix counts: about 128 tokens."""
_ALONE = 2.0
"""Seconds for which the first request with a prefix goes alone, if it is not answered before."""
_REMEMBERED = 1024
"""Prefixes that are remembered as cached."""


@dataclass(slots=True)
class _Entry(Generic[_Item]):
    """A line in the window."""

    first: int
    """Its number."""
    item: _Item
    size: int
    priority: int
    scope: bytes
    prompt: bytes
    """Empty for a line that goes when its turn comes, whatever others begin with."""


@dataclass(slots=True)
class _Group(Generic[_Item]):
    """Lines whose prompts have a prefix of `shared` bytes in common; 0 for the lines of a whole window."""

    shared: int
    children: list[_Entry[_Item] | _Group[_Item]]
    first: int = 0
    """Number of its first line in the order of the file."""
    root: bytes | None = None
    """Digest of the first `least_shared` bytes of a group that is in no other; None for the others."""


_Unit: TypeAlias = "_Entry[_Item] | _Group[_Item]"


@dataclass(slots=True)
class _Held(Generic[_Item]):
    """Lines that wait until the first with their prefix is answered, or `since` is long enough ago."""

    since: float
    root: bytes | None
    """Digest of the prefix, if no line with it was answered so far; None if only a longer one is new."""
    rest: list[_Unit[_Item]] = field(default_factory=list)


class PrefixOrder(Generic[_Item]):
    """Puts lines with a long common prefix together, within a window of lines that are read ahead.

    - Lines go in the order in which they are added, but the lines of a group, whose prompts share `least_shared` bytes
      or more, follow the first of them; within a group the same holds for lines that share `step` bytes more, and so
      on.
    - The first line of a group goes ahead of the others, as a cache has a prefix only once it was processed: they
      follow when it was `answered`, or after `alone` seconds. Meanwhile other lines go. If there are none, only lines
      whose first `least_shared` bytes are new keep waiting.
    - Lines of a better priority go before the others in the window.
    - A line may be overtaken by lines of its own window, and by those of later ones only while it waits for the first
      of its group.

    A window is `most_lines` lines or `most_bytes` bytes. While one is read, lines of earlier ones are left, so up to 2½
    windows may be held.
    """

    def __init__(
        self,
        *,
        most_lines: int = MOST_LINES,
        most_bytes: int = MOST_BYTES,
        least_shared: int = LEAST_SHARED,
        step: int = _STEP,
        alone: float = _ALONE,
    ) -> None:
        self._most_lines, self._most_bytes = most_lines, most_bytes
        self._least_shared, self._step, self._alone = least_shared, step, alone
        self._window: list[_Entry[_Item]] = []
        self._window_bytes = 0
        self._ready: deque[_Unit[_Item]] = deque()
        self._held: OrderedDict[int, _Held[_Item]] = OrderedDict()
        """By the number of the line that goes ahead; the first has waited for longest."""
        self._cold: dict[bytes, int] = {}
        """For each root whose first line goes ahead, the number of that line."""
        self._warm: OrderedDict[bytes, None] = OrderedDict()
        """Roots that are cached, the one used last at the end."""
        self._left = self._left_bytes = 0
        """Lines of earlier windows that were not taken, and their bytes."""

    def __len__(self) -> int:
        """Number of lines that were added and not taken."""
        return len(self._window) + self._left

    @property
    def full(self) -> bool:
        """Whether the window takes no more lines until others are taken."""
        return len(self._window) >= self._most_lines or self._window_bytes >= self._most_bytes

    def add(
        self, number: int, item: _Item, *, size: int, scope: bytes = b"", prompt: bytes = b"", priority: int = 0
    ) -> None:
        """Add a line that takes `size` bytes.

        Prompts are compared within one `scope` and one `priority`, lower being better. A line without a prompt stands
        alone.
        """
        comparable = prompt if len(prompt) >= self._least_shared else b""
        self._window.append(_Entry(number, item, size, priority, scope, comparable))
        self._window_bytes += size

    def take(self, now: float, *, more: bool) -> _Item | None:
        """Take the next line; None if there is none, or if all wait for others.

        `more`: whether lines can be added to a window that is not full, so that it is not ordered yet.
        """
        while self._held and now - next(iter(self._held.values())).since >= self._alone:
            self._release(next(iter(self._held)))
        while True:
            complete = self.full or not more
            if not self._ready and complete and self._window and self._has_room:
                self._order_window()
            if not self._ready and complete:
                self._release_deeper()
            if not self._ready:
                return None
            entry = self._first_of(self._ready.popleft(), now)
            if entry is not None:
                self._left -= 1
                self._left_bytes -= entry.size
                return entry.item

    def answered(self, number: int) -> None:
        """Note that a line was processed, or failed, so that those that it went ahead of may follow."""
        if number in self._held:
            self._release(number)

    @property
    def _has_room(self) -> bool:
        """Whether few enough lines are left for those of another window to be added to them."""
        return self._left <= self._most_lines // 2 and self._left_bytes <= self._most_bytes // 2

    def _first_of(self, unit: _Unit[_Item], now: float) -> _Entry[_Item] | None:
        """Take the first line of `unit`, and hold the others. None if all are held."""
        held: _Held[_Item] | None = None
        while isinstance(unit, _Group):
            if unit.root is not None and unit.root in self._warm:
                self._warm.move_to_end(unit.root)
                self._ready.extendleft(reversed(unit.children))
                unit = self._ready.popleft()
                continue
            if unit.root is not None and unit.root in self._cold:
                # A line of an earlier window goes ahead.
                self._held[self._cold[unit.root]].rest += unit.children
                return None
            held = held or _Held(now, unit.root)
            held.rest[:0] = unit.children[1:]
            unit = unit.children[0]
        if held is not None:
            self._held[unit.first] = held
            if held.root is not None:
                self._cold[held.root] = unit.first
        return unit

    def _release(self, leader: int) -> None:
        held = self._held.pop(leader)
        if held.root is not None:
            del self._cold[held.root]
            self._warm[held.root] = None
            if len(self._warm) > _REMEMBERED:
                self._warm.popitem(last=False)
        self._ready.extendleft(reversed(held.rest))

    def _release_deeper(self) -> None:
        """Release the lines that waited for longest among those whose root is cached."""
        leader = next((number for number, held in self._held.items() if held.root is None), None)
        if leader is not None:
            self._release(leader)

    def _order_window(self) -> None:
        by_priority: dict[int, list[_Entry[_Item]]] = {}
        for entry in self._window:
            by_priority.setdefault(entry.priority, []).append(entry)
        for priority in sorted(by_priority):
            self._ready.extend(self._grouped(by_priority[priority]))
        for entry in self._window:
            entry.scope = entry.prompt = b""
        self._left += len(self._window)
        self._left_bytes += self._window_bytes
        self._window, self._window_bytes = [], 0

    def _grouped(self, entries: Sequence[_Entry[_Item]]) -> list[_Unit[_Item]]:
        """The lines, in the order of the file, with those that share a prefix in groups."""
        ordered = sorted((entry for entry in entries if entry.prompt), key=lambda entry: (entry.scope, entry.prompt))
        top = _Group[_Item](0, [])
        path = [top]
        for index, entry in enumerate(ordered):
            shared = self._shared(ordered[index - 1], entry) if index else 0
            while path[-1].shared > shared:
                _settle(path.pop())
            if path[-1].shared < shared:
                # The last child, a line or a group that shares more, and this line begin a group of their own.
                group = _Group(shared, [path[-1].children.pop()])
                path[-1].children.append(group)
                path.append(group)
            path[-1].children.append(entry)
        while len(path) > 1:
            _settle(path.pop())
        for unit in top.children:
            if isinstance(unit, _Group):
                unit.root = self._root_of(_any_line(unit))
        top.children += [entry for entry in entries if not entry.prompt]
        _settle(top)
        return top.children

    def _shared(self, one: _Entry[_Item], other: _Entry[_Item]) -> int:
        """Bytes that two prompts have in common at the beginning, as far as they count."""
        least, step = self._least_shared, self._step
        if one.scope != other.scope or len(one.prompt) < least or one.prompt[:least] != other.prompt[:least]:
            return 0
        low, high = 0, (min(len(one.prompt), len(other.prompt)) - least) // step
        while low < high:
            middle = (low + high + 1) // 2
            begin, end = least + low * step, least + middle * step
            low, high = (middle, high) if one.prompt[begin:end] == other.prompt[begin:end] else (low, middle - 1)
        return least + low * step

    def _root_of(self, entry: _Entry[_Item]) -> bytes:
        return blake2b(entry.scope + b"\0" + entry.prompt[: self._least_shared], digest_size=16).digest()


def _any_line(unit: _Unit[_Item]) -> _Entry[_Item]:
    while isinstance(unit, _Group):
        unit = unit.children[0]
    return unit


def _settle(group: _Group[_Item]) -> None:
    """Put the children of a group, to which no more come, into the order of the file."""
    group.children.sort(key=lambda child: child.first)
    group.first = group.children[0].first if group.children else 0
