"""The bound of a job's time, against machines small enough to try all schedules, and where time above it went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.planning.bound import (
    PARTS,
    MachineRates,
    ModelCosts,
    NeededSteps,
    SpentTime,
    Work,
    bound_of,
    shares_of,
)
from batchwright.planning.needed_work import Answered, NeededWork, least_seconds

MODEL = ModelCosts(
    layer_operations=10.0,
    last_operations=2.0,
    head_operations=6.0,
    likeliest_operations=3.0,
    pair_operations=1.0,
    windows=((None, 1), (3, 1)),
    key_bytes=1.0,
)
RATES = MachineRates(products=10.0, attention=5.0, unshared_cost=2.0, least_step=3.0, bandwidth=4.0)
BLOCK = 4

amounts = st.integers(0, 50)
works = st.builds(
    lambda rows, logits, likeliest, pairs, prompt, answer: Work(
        rows + logits + likeliest, logits, likeliest, pairs + prompt + answer, prompt, answer
    ),
    *[amounts] * 6,
)
steps_needed = st.builds(lambda longest, more: NeededSteps(longest, longest + more), amounts, amounts)


def seconds(work: Work, steps: NeededSteps, rates: MachineRates = RATES, places: int = 2) -> float:
    return bound_of(work, steps, MODEL, rates, places=places).seconds


@given(st.integers(0, 30), st.integers(0, 30))
def test_pairs_are_those_that_queries_see(first: int, count: int) -> None:
    seen = sum(
        min(position + 1, window or 99) for position in range(first, first + count) for window, _ in MODEL.windows
    )
    assert MODEL.pairs(first, first + count) == seen


@given(works, works, steps_needed, steps_needed, st.integers(1, 5))
def test_more_work_takes_no_less(work: Work, more: Work, few: NeededSteps, others: NeededSteps, places: int) -> None:
    # Whether a row needs logits, or only its likeliest token, is told of all rows alike.
    if not work.logit_rows:
        more.logit_rows = 0.0
    both = Work()
    both.add(work)
    both.add(more)
    many = NeededSteps(max(few.longest_chain, others.longest_chain), few.of_all_chains + others.of_all_chains)
    assert seconds(both, many, places=places) >= seconds(work, few, places=places)
    assert seconds(work, few, places=places + 1) <= seconds(work, few, places=places)
    assert seconds(replace(work, unshared_prompt_keys=0.0), few) <= seconds(work, few)


@given(works, steps_needed, st.sampled_from(("products", "attention", "bandwidth")), st.floats(1.0, 9.0))
def test_a_better_machine_takes_no_longer(work: Work, steps: NeededSteps, name: str, times: float) -> None:
    better = replace(RATES, **{name: getattr(RATES, name) * times})
    assert seconds(work, steps, better) <= seconds(work, steps)
    assert seconds(work, steps, replace(RATES, least_step=RATES.least_step / times)) <= seconds(work, steps)


# A machine of which all is known: a step takes the time of its multipliers, or of what it reads if that is longer.


def best_time(chains: tuple[int, ...], places: int) -> float:
    """Return the time of the best schedule of sequences that choose so many tokens each, one in a step."""
    found: dict[tuple[int, ...], float] = {(0,) * len(chains): 0.0}

    def best(left: tuple[int, ...]) -> float:
        left = tuple(sorted(left))
        if left not in found:
            ready = [index for index, tokens in enumerate(left) if tokens]
            found[left] = min(
                step_time(size) + best(after(left, chosen))
                for size in range(1, min(places, len(ready)) + 1)
                for chosen in combinations(ready, size)
            )
        return found[left]

    return best(chains)


def after(left: tuple[int, ...], chosen: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(tokens - (index in chosen) for index, tokens in enumerate(left))


def step_time(rows: int) -> float:
    operations = Work(rows=rows, logit_rows=rows).product_operations(MODEL)
    return max(operations / RATES.products, RATES.least_step)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_no_schedule_beats_the_bound(chains: list[int], places: int) -> None:
    needed = Work(rows=sum(chains), logit_rows=sum(chains))
    bound = seconds(needed, NeededSteps(max(chains), float(sum(chains))), places=places)
    assert bound <= best_time(tuple(chains), places) * (1 + 1e-9)


@given(st.integers(1, 4), st.integers(1, 3))
def test_full_steps_reach_the_bound(chain: int, places: int) -> None:
    chains = (chain,) * places
    needed = Work(rows=sum(chains), logit_rows=sum(chains))
    bound = seconds(needed, NeededSteps(chain, float(sum(chains))), places=places)
    assert best_time(chains, places) == pytest.approx(bound)


# What sequences need.

sequences = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 6)), min_size=1, max_size=8
)


def added(needed: NeededWork, tokens: list[int], turns: int) -> None:
    turns = min(turns, len(tokens) - 1)
    prompt = len(tokens) - turns
    needed.add(tokens, prompt=prompt, chain=turns + 1, turns=turns, chosen=turns + 1, likeliest=False)


def block_of(tokens: list[int], key: int) -> tuple[int, ...] | None:
    """The prefix up to the end of the full block of a key; None if its block is not full."""
    end = (key // BLOCK + 1) * BLOCK
    return tuple(tokens[:end]) if end <= len(tokens) else None


def all_blocks(given_sequences: list[tuple[list[int], int]]) -> Iterator[list[int]]:
    for tokens, _ in given_sequences:
        yield from (tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK))


@given(sequences)
def test_every_shared_prefix_counts_once(given_sequences: list[tuple[list[int], int]]) -> None:
    needed = NeededWork(MODEL, BLOCK)
    blocks: set[tuple[int, ...]] = set()
    rows = pairs = prompt_keys = answer_keys = 0
    shared = {block for block, count in Counter(map(tuple, all_blocks(given_sequences))).items() if count > 1}
    for tokens, turns in given_sequences:
        added(needed, tokens, turns)
        turns = min(turns, len(tokens) - 1)
        new = list[int]()
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            if tuple(tokens[:end]) not in blocks:
                new += range(end - BLOCK, end)
                blocks.add(tuple(tokens[:end]))
        new += range(len(tokens) // BLOCK * BLOCK, len(tokens))
        rows += len(new)
        pairs += sum(MODEL.pairs(position, position + 1) for position in new)
        for row in range(len(tokens) - turns, len(tokens)):
            prompt_keys += sum(1 for key in range(len(tokens) - turns) if block_of(tokens, key) not in shared)
            answer_keys += sum(1 for key in new if len(tokens) - turns <= key <= row)
    found = needed.work
    assert (found.rows, found.pairs) == (rows, pairs)
    assert (found.unshared_prompt_keys, found.unshared_answer_keys) == (prompt_keys, answer_keys)


@given(sequences, st.randoms(use_true_random=False))
def test_the_order_of_answers_does_not_matter(given_sequences: list[tuple[list[int], int]], random: object) -> None:
    shuffled = list(given_sequences)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    found = []
    for order in (given_sequences, shuffled):
        needed = NeededWork(MODEL, BLOCK)
        for tokens, turns in order:
            added(needed, tokens, turns)
        found.append((needed.work.rows, needed.work.pairs, needed.work.unshared_prompt_keys, needed.steps))
    assert found[0] == found[1]


def test_in_bounded_memory_the_estimate_is_on_the_safe_side() -> None:
    exact, bounded = NeededWork(MODEL, BLOCK), NeededWork(MODEL, BLOCK, most_known=512)
    for number in range(4000):
        tokens = [number % 37] * 8 + [number % 1000, number] * 8
        for each in (exact, bounded):
            added(each, tokens, 6)
    assert bounded.sampled
    assert not exact.sampled
    assert 0.7 * exact.work.rows < bounded.work.rows <= exact.work.rows
    assert bounded.work.pairs <= exact.work.pairs
    assert 0.7 * exact.work.unshared_prompt_keys < bounded.work.unshared_prompt_keys <= exact.work.unshared_prompt_keys
    assert len(bounded._known) <= 512


def test_what_is_scored_is_computed_each_time() -> None:
    needed = NeededWork(MODEL, BLOCK)
    for _ in range(2):
        needed.add([1] * 12, prompt=12, chain=0, turns=0, chosen=0, likeliest=False, scored=range(4, 12))
    assert needed.work.rows == 12 + 8
    assert needed.work.logit_rows == 16
    assert needed.steps == NeededSteps(0, 0.0)


def test_several_tokens_of_a_step_read_the_keys_once() -> None:
    needed = NeededWork(MODEL, BLOCK)
    needed.add([1] * 10, prompt=4, chain=3, turns=2, chosen=7, likeliest=True)
    assert needed.work.unshared_prompt_keys == 2 * 4
    assert needed.work.unshared_answer_keys == 1 + 2
    assert needed.steps == NeededSteps(3, 3.0)


# Where the time went.


@given(works, works, steps_needed, st.lists(st.floats(0.0, 9.0), min_size=5, max_size=5))
def test_shares_add_up(needed: Work, more: Work, steps: NeededSteps, extra: list[float]) -> None:
    computed = Work()
    computed.add(needed)
    computed.add(more)
    bound = bound_of(needed, steps, MODEL, RATES, places=4)
    products = computed.product_operations(MODEL) / RATES.products + extra[0]
    attention = computed.attention_operations(MODEL, RATES.unshared_cost) / RATES.attention + extra[1]
    products, attention = max(products, bound.products_seconds), max(attention, bound.attention_seconds)
    forward = products + attention + extra[2]
    time = SpentTime(forward + extra[3], forward, products, attention, products * extra[4] / 9, more)
    shares = shares_of(bound, time, needed, computed, MODEL, RATES)
    assert set(shares.spent) == set(shares.lost) == set(PARTS)
    assert all(share >= 0.0 for share in (*shares.spent.values(), *shares.lost.values()))
    if time.total > 1e-6:
        assert sum(shares.spent.values()) == pytest.approx(1.0)
        assert sum(shares.lost.values()) + bound.seconds / time.total == pytest.approx(1.0)


def test_what_was_computed_twice_is_told() -> None:
    needed = Work(rows=10, pairs=10)
    bound = bound_of(needed, NeededSteps(), MODEL, RATES, places=4)
    time = SpentTime(total=10.0, forward=8.0, products=6.0, attention=1.0)
    shares = shares_of(bound, time, needed, Work(rows=20, pairs=20), MODEL, RATES)
    assert shares.spent["recomputation"] == pytest.approx(0.35)
    assert shares.spent["host"] == pytest.approx(0.2)
    assert shares.spent["other"] == pytest.approx(0.1)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(0, 19)), min_size=1, max_size=8))
def test_of_sums_alone_the_time_is_no_more_than_the_bound(lines: list[tuple[int, int, int]]) -> None:
    """Each line has a prompt of so many tokens, an answer of so many, and so many of its prompt are cached."""
    done, prompts, generated, cached = Work(), 0, 0, 0
    for prompt, answer, found in lines:
        known = min(found, prompt - 1)
        end = prompt + answer - 1
        done.add(Work(rows=end - known, likeliest_rows=answer, pairs=MODEL.pairs(known, end)))
        prompts, generated, cached = prompts + prompt, generated + answer, cached + known
    least = least_seconds(MODEL, RATES, Answered(len(lines), prompts, cached, generated))
    assert least is not None
    assert 0.0 < least <= seconds(done, NeededSteps())
    assert least_seconds(MODEL, RATES, Answered(len(lines), prompts, cached, 0)) is None
