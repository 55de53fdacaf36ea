"""Drafts: which sequences bring them along, and how many, where a step has rows to spare."""

from __future__ import annotations

from batchwright.kv import BlockManager
from batchwright.scheduling.plan import StepPlan


def add_drafts(plan: StepPlan, blocks: BlockManager, rows: int) -> None:
    """Add drafts to decodes, as far as they cost nothing: no row beyond `rows`, no block of another sequence."""
    decodes = [chunk for chunk in plan.chunks if chunk.count == 1 and chunk.samples and chunk.sequence.drafter]
    room = rows - plan.num_tokens
    for place, chunk in enumerate(decodes):
        sequence = chunk.sequence
        # The step chooses one token in any case.
        most = min(room // (len(decodes) - place), sequence.max_total - len(sequence.tokens) - 1)
        if most < 1 or sequence.drafter is None:
            continue
        drafts = sequence.drafter.draft(sequence.tokens, most)
        if blocks.grow(sequence.table, len(sequence.tokens) + len(drafts)):
            chunk.drafts = drafts
            room -= len(drafts)
