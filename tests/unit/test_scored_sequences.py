"""Sequences whose prompts are scored: each wanted position gets its logits exactly once, whatever happens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from tests.long_form import examples

from batchwright.request import Traffic
from batchwright.scheduling import Sequence

from .oracle import Bench
from .test_scheduler import SchedulerMachine


class ScoringMachine(SchedulerMachine):
    """The histories of `SchedulerMachine`, with sequences that are scored among the others."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[tuple[Sequence, range]] = []

    @rule(
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        known=st.integers(0, 12),
        pick=st.integers(0, 99),
        start=st.integers(0, 12),
        output=st.integers(0, 2),
        most=st.integers(1, 9),
        batch=st.booleans(),
    )
    def add_scored(
        self, tail: list[int], known: int, pick: int, start: int, output: int, most: int, batch: bool
    ) -> None:
        bench = self.bench
        bench.shared = True  # urgency alone does not say who goes first where logits are bounded
        bench.scheduler.max_scored = most
        prompt = (bench.all[pick % len(bench.all)].tokens[:known] if bench.all else []) + tail
        if bench.scheduler.refusal(len(prompt), output):
            prompt, output = prompt[:2], min(output, 1)
        # Without an output, the last token is none that follows another.
        end = len(prompt) if output == 0 else len(prompt) - 1
        scored = range(min(start, end), end)
        traffic: Traffic = "batch" if batch else "online"
        self.wanted.append((bench.add(prompt, output, scored=scored, traffic=traffic), scored))

    def teardown(self) -> None:
        super().teardown()
        for sequence, scored in self.wanted:
            given = self.bench.scored.get(sequence.ordinal, [])
            # One that was ended early has a beginning of them.
            assert given == list(scored)[: len(given)]
            whole = sequence.num_prompt < sequence.max_total == len(sequence.tokens)
            if whole or sequence.ordinal in self.bench.ended:
                assert len(given) == len(scored)


TestScoringMachine = ScoringMachine.TestCase
TestScoringMachine.settings = settings(max_examples=examples(30, long=100), stateful_step_count=40)


def test_a_step_has_a_bounded_number_of_scored_tokens() -> None:
    bench = Bench(shared=True)
    bench.scheduler.max_scored = 5
    first = bench.add([0, 1] * 4, 0, scored=range(2, 8))
    second = bench.add([1, 1] * 4, 1, scored=range(7))
    third = bench.add([1, 0] * 4, 1)
    shapes = [
        [(chunk.sequence, chunk.start, chunk.count, chunk.scored) for chunk in bench.step().chunks] for _ in range(3)
    ]
    assert shapes[0] == [(first, 0, 7, range(2, 7))]
    assert shapes[1] == [(first, 7, 1, range(7, 8)), (second, 0, 4, range(4)), (third, 0, 8, range(0))]
    assert shapes[2] == [(second, 4, 4, range(4, 7))]


def test_what_is_scored_is_not_taken_from_the_cache_and_the_rest_is() -> None:
    bench = Bench(block_size=4, shared=True)
    prompt = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]
    bench.add(prompt)
    bench.drain()
    for start, cached in ((9, 8), (8, 8), (7, 4), (4, 4), (3, 0), (0, 0)):
        sequence = bench.add(prompt, 0, scored=range(start, 10))
        bench.drain()
        assert (sequence.num_cached, bench.scored[sequence.ordinal]) == (cached, list(range(start, 10)))


def test_what_was_scored_before_a_preemption_is_taken_from_the_cache_after_it() -> None:
    bench = Bench(num_blocks=16, block_size=2, max_num_seqs=1, max_batch_tokens=4, shared=True)
    low = bench.add([0, 1, 0, 1, 1, 0, 0, 1], 0, scored=range(8))
    low.priority = 9
    bench.step()
    bench.add([1, 1], 2)
    bench.scheduler.running[0].priority = 9
    bench.drain()
    assert bench.scored[low.ordinal] == list(range(8))
