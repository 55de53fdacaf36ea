"""What a cache finds of a trace with shared prefixes, by its order, and the cost of planning a million requests."""

from __future__ import annotations

import json
import random
import resource
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchwright.planning.prefix_tree import Paths, PrefixTree

BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a trace."""

    blocks: list[int]
    output: int


def read_mooncake(path: Path) -> list[Request]:
    """The requests of a file in Mooncake's format."""
    with path.open() as file:
        return [Request(each["hash_ids"], each["output_length"]) for each in map(json.loads, file)]


def drawn(seed: int, requests: int) -> list[Request]:
    """Chats that continue their own history, and documents that several requests ask about."""
    source, serial = random.Random(seed), 0
    found: list[Request] = []
    open_chats: list[list[int]] = []
    for _ in range(requests):
        if open_chats and source.random() < 0.4:
            chat = source.choice(open_chats[-200:])
        else:
            chat = [0]
            open_chats.append(chat)
        grown = source.randint(1, 16)
        chat += range(serial + 1, serial + 1 + grown)
        serial += grown
        found.append(Request([*chat], source.randint(1, 800)))
    return found


def reuse(requests: Sequence[Request], order: Iterable[int], capacity: int | None) -> float:
    """Share of the blocks that a cache of `capacity` blocks (None: any number) has, least recently used forgotten."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for index in order:
        for block in requests[index].blocks:
            total += 1
            if block in cached:
                hits += 1
                cached.move_to_end(block)
                continue
            cached[block] = None
            if capacity is not None and len(cached) > capacity:
                cached.popitem(last=False)
    return hits / total


def planned(requests: Sequence[Request]) -> list[int]:
    """The planner's order."""
    tree = PrefixTree.of(Paths.of([each.blocks for each in requests]))
    return [int(index) for index in tree.order(np.array([each.output for each in requests], float))]


def seconds_of_a_million(requests: Sequence[Request], count: int = 1_000_000) -> tuple[float, float]:
    """Seconds to plan `count` requests, copies of these that share nothing with each other, and the peak GiB."""
    paths = Paths.of([each.blocks for each in requests])
    copies = -(-count // len(requests))
    apart = int(paths.blocks.max()) + 1
    blocks = np.concatenate([paths.blocks + copy * apart for copy in range(copies)])
    starts = np.concatenate([paths.starts[:-1] + copy * len(paths.blocks) for copy in range(copies)])[:count]
    end = int(paths.starts[-1]) * copies if count % len(requests) == 0 else int(starts[-1] + _last(paths, count))
    many = Paths(blocks, np.append(starts, end))
    lengths = np.tile([float(each.output) for each in requests], copies)[:count]
    began = time.perf_counter()
    order = PrefixTree.of(many).order(lengths)
    seconds = time.perf_counter() - began
    if len(order) != count:
        raise RuntimeError("requests are missing in the plan")
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _last(paths: Paths, count: int) -> int:
    index = (count - 1) % len(paths)
    return int(paths.starts[index + 1] - paths.starts[index])
