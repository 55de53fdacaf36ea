"""The order of fields: every field once, equal values first, and never less reuse than the template's own order has."""

from __future__ import annotations

import random
from itertools import permutations, product

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.long_form import examples

from batchwright.planning.field_order import FieldOrder, reuse_of

values = st.sampled_from(["a", "bb", "cccc", "dddddddd", ""])
tables = st.integers(1, 4).flatmap(lambda count: st.lists(st.tuples(*[values] * count), max_size=25))


@settings(max_examples=examples(70, long=200))
@given(tables, tables)
def test_each_field_comes_once_in_rows_that_were_seen_and_others(
    rows: list[tuple[str, ...]], others: list[tuple[str, ...]]
) -> None:
    order = FieldOrder(rows)
    for row in (*rows, *(each for each in others if rows and len(each) == len(rows[0]))):
        assert sorted(order.of(row)) == list(range(len(row)))
        assert order.of(row) == order.of(list(row))


@settings(max_examples=examples(70, long=200))
@given(tables)
def test_nothing_is_shared_only_where_nothing_can_be(rows: list[tuple[str, ...]]) -> None:
    reuse = reuse_of(rows, FieldOrder(rows))
    assert 0.0 <= reuse.after <= 1.0
    texts = [(name, value) for row in rows for name, value in enumerate(row) if value]
    assert (reuse.after > 0.0) == (len(set(texts)) < len(texts))


def test_what_repeats_comes_first() -> None:
    rows = [(f"review number {number}", f"product {number % 3}, with a long description") for number in range(30)]
    order = FieldOrder(rows)
    assert {order.of(row) for row in rows} == {(1, 0)}
    reuse = reuse_of(rows, order)
    assert reuse.before == 0.0
    assert reuse.after > 0.6


def test_many_rows_with_a_short_value_do_not_hide_a_few_with_a_long_one() -> None:
    draw = random.Random(5)
    rows = [(f"category {draw.randrange(4)}", f"product {number % 40} " + "x" * 90) for number in range(400)]
    assert reuse_of(rows, FieldOrder(rows)).after > 0.8


def test_rows_differ_in_what_they_begin_with() -> None:
    # A half of the rows has the same author, the other one the same article.
    rows = [("the author of many", f"article {number}, of its own") for number in range(10)]
    rows += [(f"author {number}", "the article of many remarks") for number in range(10)]
    order = FieldOrder(rows)
    assert {order.of(row) for row in rows[:10]} == {(0, 1)}
    assert {order.of(row) for row in rows[10:]} == {(1, 0)}


def test_it_is_close_to_the_best_of_all_orders_of_small_tables() -> None:
    draw = random.Random(3)
    shares = []
    for _ in range(60):
        rows = [tuple(draw.choice(["a", "bb", "cccc"]) for _ in range(3)) for _ in range(4)]
        total = sum(len(value) for row in rows for value in row)
        best = 0
        for orders in product(permutations(range(3)), repeat=4):
            seen, found = set(), 0
            for row, order in zip(rows, orders, strict=True):
                for length in (1, 2, 3):
                    prefix = tuple((name, row[name]) for name in order[:length])
                    found += len(row[order[length - 1]]) * (prefix in seen)
                    seen.add(prefix)
            best = max(best, found)
        shares.append(reuse_of(rows, FieldOrder(rows)).after * total / best if best else 1.0)
    assert min(shares) > 0.5
    assert sum(shares) / len(shares) > 0.9
