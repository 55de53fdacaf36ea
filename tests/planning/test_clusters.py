"""Templates of lines: the longest prefixes that enough of them share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchwright.planning.clusters import clusters_of
from batchwright.planning.expected_lengths import Cluster
from batchwright.planning.prefix_tree import Paths, PrefixTree


def found(
    prompts: list[list[int]], lines: int | None = None, earlier: Sequence[Cluster | None] | None = None
) -> list[Cluster]:
    paths = Paths.joined([np.array(each, np.int64) for each in prompts])
    return clusters_of([100] * (len(prompts) if lines is None else lines), PrefixTree.of(paths), paths, earlier)


def _blocks(cluster: Cluster) -> tuple[int, int]:
    """Lengths of the template and of the broader one."""
    return cluster.blocks, 0 if cluster.broader is None else cluster.broader.blocks


def test_the_template_is_the_longest_prefix_that_eight_share() -> None:
    seven, eight = [[9, 1, each] for each in range(7)], [[9, 2, each] for each in range(8)]
    clusters = found([*seven, *eight, [4, 4]])
    assert {_blocks(each) for each in clusters[:7]} == {(1, 0)}
    assert {_blocks(each) for each in clusters[7:15]} == {(2, 1)}
    assert clusters[7].broader == clusters[0].template
    assert len(set(clusters[:7])) == len(set(clusters[7:15])) == 1
    assert clusters[15].template is None


def test_the_broader_one_of_a_document_is_its_task() -> None:
    prompts = [[1, task, task, document, each] for task in range(2) for document in range(4) for each in range(8)]
    clusters = found(prompts)
    assert {_blocks(each) for each in clusters} == {(4, 3)}
    assert len({each.template for each in clusters}) == 8
    assert len({each.broader for each in clusters}) == 2


def test_what_is_cached_counts_as_no_line() -> None:
    prompts = [[9, each] for each in range(8)]
    assert {_blocks(each) for each in found(prompts, lines=7)} == {(0, 0)}
    assert {_blocks(each) for each in found(prompts, lines=8)} == {(1, 0)}


def test_a_longer_template_of_before_is_kept() -> None:
    many = found([[9, task, each] for task in range(2) for each in range(10)])
    left = found([[9, 0, 8], [9, 0, 9], [9, 1, 9]], earlier=[many[8], many[9], many[19]])
    assert left == [many[8], many[9], many[19]]


def test_a_shorter_template_of_before_is_the_broader_one() -> None:
    before = found([[9, each, each] for each in range(8)])
    [cluster] = set(found([[9, 5, each] for each in range(8)], earlier=before))
    assert _blocks(cluster) == (2, 1)
    assert cluster.broader == before[0].template
