"""Clusters of lines whose answers should have similar lengths, by templates found in a tree of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchwright.planning.expected_lengths import Cluster, ExpectedLengths, Template
from batchwright.planning.prefix_tree import Paths, PrefixTree

_LEAST_SHARED = 8
"""Least number of lines with a common prefix for it to say something about their answers."""


def clusters_of(
    prompt_tokens: Sequence[int], tree: PrefixTree, paths: Paths, earlier: Sequence[Cluster | None] | None = None
) -> list[Cluster]:
    """The clusters of lines, which are the first prompts of `tree`; `paths` are those of all its prompts.

    The template of a line is the longest prefix that it shares with at least seven other lines, and the broader one
    the next shorter. `earlier` are the clusters that the lines had while others were held too: such a cluster is kept
    if its template is no shorter than the one found now, since the lines that shared it are being answered; a shorter
    template becomes the broader one if it is longer than the one found now, since answers to it are known.
    """
    found = []
    for line, (tokens, (template, broader)) in enumerate(
        zip(prompt_tokens, _templates(tree, paths, len(prompt_tokens)), strict=True)
    ):
        before = None if earlier is None else earlier[line]
        if before is not None and before.blocks >= _length(template):
            found.append(before)
            continue
        if before is not None and before.blocks > _length(broader):
            broader = before.template
        found.append(ExpectedLengths.cluster(tokens, template, broader))
    return found


def _templates(tree: PrefixTree, paths: Paths, lines: int) -> list[tuple[Template | None, Template | None]]:
    """For each line, the two longest of its prefixes that enough others share, the longest first."""
    shared = (tree.counts_of(lines) >= _LEAST_SHARED) & (tree.depths > 0)
    nearest, ids = tree.nearest(shared), tree.ids(paths)
    above = np.where(tree.parents < 0, -1, nearest[tree.parents])
    templates: dict[int, Template | None] = {-1: None}
    templates |= {node: Template(int(ids[node]), int(tree.depths[node])) for node in np.flatnonzero(shared).tolist()}
    nodes = nearest[tree.nodes[:lines]]
    return [
        (templates[node], templates[parent])
        for node, parent in zip(nodes.tolist(), np.where(nodes < 0, -1, above[nodes]).tolist(), strict=True)
    ]


def _length(template: Template | None) -> int:
    return 0 if template is None else template.blocks
