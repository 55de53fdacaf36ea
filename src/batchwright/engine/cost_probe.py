"""A probe of step costs: a few seconds of steps of planned shapes, for a model whose costs are not known yet."""

from __future__ import annotations

import random

from batchwright.engine.engine import Engine
from batchwright.engine.step.multi_step import MOST_STEPS
from batchwright.request import InferenceRequest

_STEPS = 5
"""Steps in each part that compute a token for each sequence."""
_ROWS = (1, 4, 2, 16, 8, 32, 64)
_SHORT, _LONG = 16, 1536
"""Tokens of prompts."""


def probe(engine: Engine, seconds: float = 12.0) -> None:
    """Compute steps of few and many rows, of short and long prompts, and of both; begin no new part after `seconds`.

    The engine must hold no other request. The times of the steps are left in its scheduler's record.
    """
    core, draw = engine.core, random.Random(0)
    began = core.clock.now()
    vocab, room = core.body.vocab_size, core.scheduler.blocks.num_blocks * core.scheduler.blocks.block_size
    longest = min(core.max_model_len, room)
    answer = max(1, min(_STEPS + 1, longest - 1))

    def submit(count: int, prompt: int) -> None:
        most = max(1, min(prompt, longest - answer))
        for _ in range(count):
            tokens = [draw.randrange(vocab) for _ in range(most)]
            engine.submit(InferenceRequest(tokens, max_tokens=answer, ignore_eos=True, seed=0))

    def finish() -> None:
        while engine.unfinished:
            engine.step(MOST_STEPS)

    submit(1, _SHORT)
    finish()
    core.scheduler.record.clear()  # the first steps include one-time setup
    for count, prompt in (*((rows, _SHORT) for rows in _ROWS[:4]), (1, _LONG)):
        submit(min(count, core.scheduler.max_num_seqs), prompt)
        finish()
    for rows in _ROWS[4:]:
        if core.clock.now() - began > seconds:
            return
        submit(min(rows, core.scheduler.max_num_seqs), _SHORT)
        finish()
    # A prompt beside sequences that decode.
    submit(16, _SHORT)
    while core.scheduler.num_waiting or any(not each.is_decode for each in core.scheduler.running):
        engine.step()
    submit(1, 400)
    finish()
