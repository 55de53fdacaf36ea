"""The tree of shared prefixes, compared with what is found prompt by prompt."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchwright.planning.prefix_tree import Paths, PrefixTree, block_ids

# Few blocks, so that prefixes are shared; a block means the same only after the same ones.
prompts = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=24)


def _prefixes(prompts: list[list[int]]) -> dict[tuple[int, ...], int]:
    """Numbers of prompts by each prefix, the empty one left out."""
    counts: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            counts[tuple(prompt[:end])] = counts.get(tuple(prompt[:end]), 0) + 1
    return counts


@given(prompts)
def test_what_is_shared_is_counted_once(prompts: list[list[int]]) -> None:
    counts = _prefixes(prompts)
    tree = PrefixTree.of(Paths.of(prompts))
    assert tree.shared_blocks == sum(count - 1 for count in counts.values())
    for prompt, node in zip(prompts, tree.nodes.tolist(), strict=True):
        shared = max((end for end in range(len(prompt) + 1) if counts.get(tuple(prompt[:end]), 0) > 1), default=0)
        # Behind the longest prefix that is shared all go their own ways.
        assert tree.depths[node] == shared or len(prompts) == 1
    assert (tree.parents[1:] < np.arange(1, len(tree.parents))).all()
    assert (tree.depths[1:] > tree.depths[tree.parents[1:]]).all()
    assert (tree.counts[1:] > 1).all()


@given(prompts, st.integers(1, 24), st.integers(1, 24))
def test_nodes_of_a_prompt_are_found_by_their_counts(prompts: list[list[int]], chosen: int, above: int) -> None:
    paths = Paths.of(prompts)
    tree = PrefixTree.of(paths)
    is_above = tree.counts >= min(above, len(prompts))
    nearest, below = tree.nearest(tree.counts >= chosen)[tree.nodes], tree.below(is_above)
    ids: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(prompts):
        branch = [int(tree.nodes[number])]
        while branch[-1]:
            branch.append(int(tree.parents[branch[-1]]))
        assert nearest[number] == next((node for node in branch if tree.counts[node] >= chosen), -1)
        assert below[number] == next((node for node in branch[::-1] if not is_above[node]), -1)
        for node in branch if len(prompts) > 1 else []:
            assert ids.setdefault(tuple(prompt[: tree.depths[node]]), tree.ids(paths)[node]) == tree.ids(paths)[node]
    assert len({(len(prefix), each) for prefix, each in ids.items()}) == len(ids)


@given(prompts, st.data())
def test_the_first_prompts_are_counted_alone(prompts: list[list[int]], data: st.DataObject) -> None:
    lines = data.draw(st.integers(0, len(prompts)))
    tree = PrefixTree.of(Paths.of(prompts))
    counts = [0] * len(tree.parents)
    for node in tree.nodes[:lines].tolist():
        while node >= 0:
            counts[node] += 1
            node = int(tree.parents[node])
    assert tree.counts_of(lines).tolist() == counts


def test_ids_are_those_of_the_prefix_whatever_else_is_there() -> None:
    few, many = [[5, 6, 7], [5, 6, 8]], [[1, 2], [5, 6, 9], [5, 6, 7, 7], [1, 3], [5, 4], [5, 6, 7, 8]]
    found = []
    for each in (few, many):
        paths = Paths.of(each)
        tree = PrefixTree.of(paths)
        node = int(tree.nodes[0 if each is few else 1])
        assert tree.depths[node] == 2
        found.append(int(tree.ids(paths)[node]))
    assert found[0] == found[1]


def test_tokens_that_change_places_over_blocks_make_another_prefix() -> None:
    ids = set()
    for first, second in (([1, 2], [3, 4]), ([1, 3], [2, 4])):
        path = np.concatenate([block_ids([*first, *second], 2)])
        paths = Paths.joined([path, path])
        ids.add(int(PrefixTree.of(paths).ids(paths)[0]))
    assert len(ids) == 2


@given(prompts, st.data())
def test_a_cache_of_one_path_computes_each_prefix_once(prompts: list[list[int]], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.floats(0, 9), min_size=len(prompts), max_size=len(prompts)))
    order = PrefixTree.of(Paths.of(prompts)).order(np.array(lengths))
    assert sorted(order) == list(range(len(prompts)))
    computed = 0
    cached: list[int] = []
    for prompt in (prompts[number] for number in order):
        same = next((at for at, pair in enumerate(zip(cached, prompt, strict=False)) if pair[0] != pair[1]), None)
        computed += len(prompt) - (min(len(cached), len(prompt)) if same is None else same)
        # A prompt that ends within the path does not push out what follows.
        cached = cached if same is None and len(cached) > len(prompt) else prompt
    assert computed == len(_prefixes(prompts))


@given(prompts, st.data())
def test_greater_values_come_first_where_there_is_a_choice(prompts: list[list[int]], data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 3), min_size=len(prompts), max_size=len(prompts)))
    tree = PrefixTree.of(Paths.of(prompts))
    order = tree.order(np.array(values, float))
    for node in range(len(tree.parents)):
        children: OrderedDict[tuple[str, int], list[int]] = OrderedDict()
        for number in order.tolist():
            at, below = int(tree.nodes[number]), None
            while at not in (node, -1):
                below, at = at, int(tree.parents[at])
            if at == node:
                children.setdefault(("prompt", number) if below is None else ("node", below), []).append(number)
        keys = [(-max(values[each] for each in child), min(child)) for child in children.values()]
        assert keys == sorted(keys)
