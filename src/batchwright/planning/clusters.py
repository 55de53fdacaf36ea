"""Clusters of lines whose answers are expected to have like lengths, by templates, which a tree of prompts shows."""

from __future__ import annotations

from collections.abc import Sequence

from batchwright.planning.expected_lengths import Cluster, ExpectedLengths, Template
from batchwright.planning.prefix_tree import Paths, PrefixTree

_LEAST_TOLD = 8
"""Lines with a common beginning from which on it may tell something about their answers."""


def clusters_of(
    prompt_tokens: Sequence[int], tree: PrefixTree, paths: Paths, earlier: Sequence[Cluster | None] | None = None
) -> list[Cluster]:
    """The clusters of lines, which are the first prompts of `tree`; `paths` are those of all its prompts.

    The template of a line is the longest beginning that it shares with at least seven others, and the broader one its
    first block. `earlier` are the clusters that the lines had while others were held too: a longer template is kept,
    since the lines that shared it are being answered, and a shorter one is the broader one, since answers are known of
    it.
    """
    found = []
    for line, (tokens, template) in enumerate(zip(prompt_tokens, _templates(tree, paths), strict=False)):
        before = None if earlier is None else earlier[line]
        if before is not None and before.blocks >= (0 if template is None else template.blocks):
            found.append(before)
            continue
        broader = None
        if template is not None and template.blocks > 1:
            first = Template(int(paths.blocks[paths.starts[line]]), 1)
            broader = before.template if before is not None and before.template is not None else first
        found.append(ExpectedLengths.cluster(tokens, template, broader))
    return found


def _templates(tree: PrefixTree, paths: Paths) -> list[Template | None]:
    """For each prompt, the longest of its beginnings that enough others share."""
    nodes = tree.nearest((tree.counts >= _LEAST_TOLD) & (tree.depths > 0))
    templates = [Template(*each) for each in zip(tree.ids(paths).tolist(), tree.depths.tolist(), strict=True)]
    return [None if node < 0 else templates[node] for node in nodes.tolist()]
