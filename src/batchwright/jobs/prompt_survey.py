"""What the prompts of a job have in common, determined from their texts before anything is computed."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from batchwright.jobs.token_counts import BYTES_OF_A_TOKEN
from batchwright.planning.prefix_order import LEAST_SHARED
from batchwright.planning.prefix_tree import Paths, PrefixTree, block_ids

_BLOCK = 64
"""Bytes in which prefixes are compared: about a block of 16 tokens of English text."""
_WORD = 8
"""Bytes that are compared as one number."""
_AT_ONCE = 2**20
"""Bytes of texts after which they are converted to ids."""
_CHARACTERS = 200
"""Characters of a prefix that are shown."""
_SHOWN = 10
"""Prefixes that are shown, those that save the most."""
_Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
PromptPlace = tuple[int, int]
"""Number of a line, and the index of a prompt among those of the line."""
PromptTexts = Mapping[PromptPlace, bytes | Sequence[int]]
"""Prompts by their places, as texts or token ids; each id takes `BYTES_OF_A_TOKEN` bytes of the added text."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix that the prompts of several lines have in common."""

    lines: int
    tokens: int
    """Approximate number of its tokens, including those of the prefix around it."""
    saved_tokens: int
    """About the tokens saved by computing it only once, without those of the prefix around it."""
    example: int
    """Number of a line with it."""
    text: str
    """The beginning of its text, after the prefix around it."""
    inside: list[SharedPrefix] = field(default_factory=list)
    """Longer prefixes that some of these lines share."""


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """What is computed only once if lines are started in the right order."""

    shared_tokens: int
    """About the prompt tokens that are found in the cache when lines with a prefix follow one another."""
    shared_in_input_order: int
    """About those that are found when lines are computed in the order of the input."""
    prefixes: list[SharedPrefix]
    """The largest ones, by the tokens that they save; those within others are inside them. For an endpoint elsewhere,
    of those that a provider's cache keeps."""
    cache_tokens: int | None = None
    """Tokens of the cache of `shared_in_input_order`; None: it is unlimited, since that of the engine is not known."""
    provider_tokens: int = 0
    """About those that are found in the cache of a provider, which keeps long prefixes only."""


class PromptSurvey:
    """Collects the prompts of lines, in 8 bytes for each 64 of their texts."""

    def __init__(self, least: int = 0) -> None:
        """`least`: bytes of the shortest prefix that is shown."""
        self._least = least // _BLOCK
        self._numbers, self._blocks_of = array("Q"), array("Q")
        self._bytes = 0
        self._blocks: list[_Ints] = []
        """Ids of the blocks of all prompts, one prompt after the other, without those in `_rest`."""
        self._rest = bytearray()
        """Texts of the latest prompts, without incomplete blocks."""

    def add(self, number: int, text: bytes) -> None:
        """Add the prompt of a line."""
        blocks = len(text) // _BLOCK
        self._rest += text[: blocks * _BLOCK]
        self._numbers.append(number)
        self._blocks_of.append(blocks)
        self._bytes += len(text)
        if len(self._rest) >= _AT_ONCE:
            self._take_in()

    def _take_in(self) -> None:
        self._blocks.append(block_ids(np.frombuffer(self._rest, np.int64), _BLOCK // _WORD))
        self._rest = bytearray()

    def result(
        self, tokens: int, kv_tokens: int | None, texts_of: Callable[[Collection[PromptPlace]], PromptTexts]
    ) -> SharedPrompts:
        """What the prompts share, if they have `tokens` tokens in total.

        `kv_tokens`: what the KV cache holds; None for any number. `texts_of` returns prompts by their places.
        """
        each_block = _BLOCK * tokens / max(1, self._bytes)
        self._take_in()
        lengths = np.asarray(self._blocks_of, np.int64)
        paths = Paths(np.concatenate(self._blocks), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        self._blocks = [paths.blocks]
        tree = PrefixTree.of(paths)
        # An unlimited cache finds in any order what can be found in the best one.
        found = tree.shared_blocks if kv_tokens is None else sum(_found(paths, int(kv_tokens / max(1e-9, each_block))))
        largest = [*self._largest(tree, each_block, texts_of)]
        return SharedPrompts(
            round(tree.shared_blocks * each_block),
            round(found * each_block),
            largest,
            kv_tokens,
            round(int(_saved_blocks(tree, LEAST_SHARED // _BLOCK).sum()) * each_block),
        )

    def _largest(
        self, tree: PrefixTree, each_block: float, texts_of: Callable[[Collection[PromptPlace]], PromptTexts]
    ) -> Iterator[SharedPrefix]:
        saved = _saved_blocks(tree, self._least)
        chosen = [int(node) for node in np.argsort(-saved, kind="stable")[:_SHOWN] if saved[node] > 0]
        examples = self._examples(tree)
        places = {node: self._place_of(examples[node]) for node in chosen}
        texts = texts_of({*places.values()})
        made: dict[int, SharedPrefix] = {}
        for node in chosen:
            parent = int(tree.parents[node])
            before = int(tree.depths[parent]) if parent >= 0 else 0
            start = before * _BLOCK if before >= self._least else 0
            made[node] = SharedPrefix(
                lines=int(tree.counts[node]),
                tokens=round(float(tree.depths[node]) * each_block),
                saved_tokens=round(float(saved[node]) * each_block),
                example=places[node][0],
                text=_shown(texts.get(places[node], b""), start, int(tree.depths[node]) * _BLOCK)[:_CHARACTERS],
            )
        for node in chosen:
            around = int(tree.parents[node])
            while around >= 0 and around not in made:
                around = int(tree.parents[around])
            if around >= 0:
                made[around].inside.append(made[node])
            else:
                yield made[node]

    def _examples(self, tree: PrefixTree) -> list[int]:
        """The first prompt with the prefix of each node, by its number among all."""
        first = np.full(len(tree.parents), len(tree))
        np.minimum.at(first, tree.nodes, np.arange(len(tree)))
        for node in range(len(tree.parents) - 1, 0, -1):
            parent = tree.parents[node]
            first[parent] = min(first[parent], first[node])
        found: list[int] = first.tolist()
        return found

    def _place_of(self, prompt: int) -> PromptPlace:
        number, first = self._numbers[prompt], prompt
        while first and self._numbers[first - 1] == number:
            first -= 1
        return number, prompt - first


def _shown(prompt: bytes | Sequence[int], start: int, end: int) -> str:
    """Return the text of a prompt between two of its bytes."""
    if isinstance(prompt, bytes):
        return prompt[start:end].decode(errors="replace")
    ids = prompt[start // BYTES_OF_A_TOKEN : end // BYTES_OF_A_TOKEN]
    return f"token ids {', '.join(map(str, ids))}"


def _saved_blocks(tree: PrefixTree, least: int) -> _Ints:
    """Return the blocks of each node that need not be computed again, if prefixes from `least` blocks on are kept."""
    around = np.where(tree.parents >= 0, tree.depths[tree.parents], 0)
    own = tree.depths - np.where(around >= least, around, 0)
    return np.where(tree.depths >= least, own * np.maximum(tree.counts - 1, 0), 0)


def _found(paths: Paths, most: int) -> Iterator[int]:
    """For each prompt, the blocks of it in a cache of `most` blocks that evicts the least recently used."""
    cached: OrderedDict[tuple[int, int], int] = OrderedDict()
    serial = 0
    for start, end in pairwise(paths.starts.tolist()):
        before, hits = 0, 0
        for block in paths.blocks[start:end].tolist():
            key = before, block
            known = cached.get(key)
            if known is None:
                serial += 1
                if len(cached) >= most and cached:
                    cached.popitem(last=False)
                cached[key] = known = serial
            else:
                hits += 1
                cached.move_to_end(key)
            before = known
        yield hits
