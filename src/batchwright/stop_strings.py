"""Stop strings in streamed text, found by one automaton whatever their number.

`StopAutomaton` is that of Aho and Corasick (1975): a tree of all stop strings in which every node knows where to go on
when the next character leads nowhere. Reading a character costs the same, amortized, for one stop string and for ten
thousand.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from weakref import WeakValueDictionary

_BRANCHES, _ENDS = 1, 2


class StopAutomaton:
    """The tables for one set of stop strings. They are read-only, so any number of texts can share them.

    A node stands for a prefix of some stop string, node 0 for the empty one. The node of a text is the longest
    incomplete prefix that the text ends with: exactly what has to be held back.
    """

    # The strings are added in sorted order, so nodes are numbered depth first and the first child of a node is the next
    # number. Only further children need a dictionary. The tables for 16 strings of 256 characters take 86 kB,
    # which matters because clients choose them.

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = array("i", [0])
        """Length of the text of each node."""
        self._codes = array("i", [-1])
        """Code point that leads to each node from its parent."""
        self._branches: dict[int, dict[int, int]] = {}
        """Children but the first of the nodes with several, by code point."""
        self._matches = array("i", [0])
        """Length of the longest stop string that the text of each node ends with; 0 for none."""
        parents = self._add_all(stops)
        self._retreats = array("i", [0]) * len(parents)
        """Node of the longest other text with children that the text of each node ends with."""
        self._holds = array("i", [0]) * len(parents)
        """Node itself if it has children, else the one that it retreats to."""
        self._kinds = bytearray(len(parents))
        """Whether each node has branches, and whether a stop string ends there. Most have neither, so the larger
        tables, which do not fit the processor's caches, are seldom read.
        """
        self._link(parents)

    def read(self, node: int, text: str, *, armed: bool) -> tuple[int, int, int]:
        """Return the node after reading `text` from `node`, with the end in `text` and the length of the stop string.

        Reading ends with the first character that completes a stop string; of several, the longest counts. The length
        is 0 when there was none. While not `armed`, nothing counts.
        """
        # `_next` inlined: calling it for every character would take as long as the rest.
        codes, kinds = self._codes, self._kinds
        for position, code in enumerate(map(ord, text), 1):
            while codes[node + 1] != code:
                if kinds[node] & _BRANCHES and (child := self._branches[node].get(code)):
                    node = child
                    break
                if not node:
                    break
                node = self._retreats[node]
            else:
                node += 1
            if kinds[node] & _ENDS:
                if armed:
                    return 0, position, self._matches[node]
                node = self._holds[node]
        return node, len(text), 0

    def _add_all(self, stops: Sequence[str]) -> array[int]:
        """Make the nodes, and return the parent of each."""
        parents = array("i", [-1])
        path, before = [0], ""
        for stop in sorted(set(stops)):
            del path[_common(before, stop) + 1 :]
            before = stop
            for code in map(ord, stop[len(path) - 1 :]):
                parent, node = path[-1], len(parents)
                if node != parent + 1:
                    self._branches.setdefault(parent, {})[code] = node
                parents.append(parent)
                self._codes.append(code)
                self.depths.append(len(path))
                self._matches.append(0)
                path.append(node)
            self._matches[path[-1]] = len(stop)
        # What `read` looks at for a root without children.
        self._codes.append(-1)
        self.depths.append(0)
        return parents

    def _link(self, parents: array[int]) -> None:
        """Find where each node retreats to, and which stop strings end within it, from short texts to long ones."""
        for node in sorted(range(1, len(parents)), key=self.depths.__getitem__):
            parent = parents[node]
            suffix = self._next(self._retreats[parent], self._codes[node]) if parent else 0
            self._matches[node] = self._matches[node] or self._matches[suffix]
            self._retreats[node] = self._holds[suffix]
            has_children = self.depths[node + 1] > self.depths[node]
            self._holds[node] = node if has_children else self._retreats[node]
            self._kinds[node] = _ENDS * bool(self._matches[node]) + _BRANCHES * (node in self._branches)
        self._kinds[0] = _BRANCHES * (0 in self._branches)

    def _next(self, node: int, code: int) -> int:
        """Return the node after one more character at `node`, which is the root or has children."""
        codes, branches = self._codes, self._branches
        while codes[node + 1] != code:
            if node in branches and (child := branches[node].get(code)):
                return child
            if not node:
                return 0
            node = self._retreats[node]
        return node + 1


def _common(first: str, second: str) -> int:
    """Return how many first characters two texts have in common."""
    for length, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return length
    return min(len(first), len(second))


class StopStrings:
    """Passes text on up to the first stop string that is complete, and holds back what may be the beginning of one.

    Of two that are complete at the same character, the longer one counts. So the outcome does not depend on how the
    text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._node = 0
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Return `(text to pass on, whether a stop string was met)`. While not `armed`, nothing stops.

        A stop string that begins in text that was not armed, and ends in text that is, counts.
        """
        automaton = self._automaton
        if automaton is None:
            return text, False
        known = len(self._held)
        self._node, end, length = automaton.read(self._node, text, armed=armed)
        self._held += text
        if length:
            passed, self._held = self._held[: known + end - length], ""
            return passed, True
        return self._release(automaton.depths[self._node]), False

    def flush(self) -> str:
        """Return what was held back, when no more text comes."""
        self._node = 0
        return self._release(0)

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed


_in_use: WeakValueDictionary[tuple[str, ...], StopAutomaton] = WeakValueDictionary()


def _automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """Return the one automaton for all texts with the same stop strings, kept as long as any of them is in use."""
    automaton = _in_use.get(stops)
    if automaton is None:
        _in_use[stops] = automaton = StopAutomaton(stops)
    return automaton
