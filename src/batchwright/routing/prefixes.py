"""The prefixes of prompts that the KV cache of each replica is expected to hold.

A prompt is identified by a chain of keys, each a hash of all of its text up to a multiple of 256 bytes, about 64
tokens. What a replica was given stays in its cache until as many other tokens have been computed there as the cache
holds; the least recently used is dropped first. Its engine does the same, so there is no need to ask about its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

KEY_BYTES = 256
KEY_TOKENS = 64
"""Tokens in `KEY_BYTES` of English text."""
_DIGEST = 8
MOST_KEYS = 1024
"""Most keys of a prompt: text beyond them counts as not shared."""


def prefix_keys(scope: bytes, prompt: bytes) -> tuple[int, ...]:
    """Return the keys of the prefixes of `prompt`, the shortest first; prompts are compared within one `scope`."""
    chain = blake2b(scope, digest_size=_DIGEST)
    keys = []
    for start in range(0, min(len(prompt), MOST_KEYS * KEY_BYTES) - KEY_BYTES + 1, KEY_BYTES):
        chain.update(prompt[start : start + KEY_BYTES])
        keys.append(int.from_bytes(chain.digest(), "little"))
    return tuple(keys)


class CachedPrefixes:
    """The prefixes that replicas, numbered from 0, are expected to hold.

    Memory is bounded by the replicas' caches and the prompts that wait for them.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """Replicas that hold each key, as a set of bits."""
        self._held: dict[int, OrderedDict[int, int]] = {}
        """Tokens of each key of each replica, the most recently used last. Keys below 0 are answers, never found."""
        self._promised: dict[int, dict[int, int]] = {}
        """Numbers of prompts that wait for each replica, by the keys that they contain."""
        self._capacity: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._answers = 0

    def __len__(self) -> int:
        """Return the number of keys of all replicas."""
        return sum(map(len, self._held.values()))

    def join(self, replica: int, tokens: int) -> None:
        """Add a replica, whose cache is empty and holds `tokens` tokens."""
        self._held[replica], self._promised[replica] = OrderedDict(), {}
        self._capacity[replica], self._used[replica] = tokens, 0

    def leave(self, replica: int) -> None:
        """Forget a replica."""
        for key in self._held.pop(replica).keys() | self._promised.pop(replica).keys():
            self._drop(replica, key)
        del self._capacity[replica], self._used[replica]

    def known(self, keys: Sequence[int]) -> dict[int, int]:
        """Return how many of `keys`, from the first on, each replica holds or will hold, without those with none."""
        found: dict[int, int] = {}
        holding, length = -1, 0
        for key in keys:
            still = holding & self._holders.get(key, 0)
            if length and still != holding:
                found |= dict.fromkeys(_bits(holding & ~still), length)
            if not still:
                return found
            holding, length = still, length + 1
        if length:
            found |= dict.fromkeys(_bits(holding), length)
        return found

    def known_to(self, replica: int, keys: Sequence[int]) -> int:
        """Return how many of `keys`, from the first on, `replica` holds or will hold."""
        held, promised = self._held[replica], self._promised[replica]
        return next((i for i, key in enumerate(keys) if key not in held and key not in promised), len(keys))

    def promise(self, replica: int, keys: Sequence[int]) -> None:
        """Note that a prompt with these keys waits for `replica`."""
        promised = self._promised[replica]
        for key in keys:
            promised[key] = promised.get(key, 0) + 1
            self._holders[key] = self._holders.get(key, 0) | 1 << replica

    def withdraw(self, replica: int, keys: Sequence[int]) -> None:
        """Note that a promised prompt no longer waits."""
        promised = self._promised[replica]
        for key in keys:
            promised[key] -= 1
            if not promised[key]:
                del promised[key]
                if key not in self._held[replica]:
                    self._drop(replica, key)

    def note(self, replica: int, keys: Sequence[int]) -> None:
        """Note that `replica` computes a prompt with these keys."""
        held = self._held[replica]
        # The end of a prompt is dropped before its prefix, which other prompts share.
        for key in reversed(keys):
            if key in held:
                held.move_to_end(key)
            else:
                held[key] = KEY_TOKENS
                self._used[replica] += KEY_TOKENS
                self._holders[key] = self._holders.get(key, 0) | 1 << replica
        self._evict(replica)

    def note_answer(self, replica: int, tokens: int) -> None:
        """Note that `replica` computed `tokens` tokens that no prompt is expected to begin with."""
        if tokens > 0:
            self._answers += 1
            self._held[replica][-self._answers] = tokens
            self._used[replica] += tokens
            self._evict(replica)

    def _evict(self, replica: int) -> None:
        held = self._held[replica]
        while self._used[replica] > self._capacity[replica] and held:
            key, tokens = held.popitem(last=False)
            self._used[replica] -= tokens
            if key not in self._promised[replica]:
                self._drop(replica, key)

    def _drop(self, replica: int, key: int) -> None:
        if key < 0:
            return
        left = self._holders[key] & ~(1 << replica)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
