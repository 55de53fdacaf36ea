"""What is expected of answers, compared with a histogram at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.planning.expected_lengths import Cluster, ExpectedLengths, Template

templates = st.none() | st.builds(Template, st.integers(0, 1), st.just(2))
clusters = st.builds(
    lambda tokens, template, broader: ExpectedLengths.cluster(tokens, template, broader if template else None),
    st.integers(1, 500),
    templates,
    st.none() | st.builds(Template, st.integers(2, 3), st.just(1)),
)


@given(
    st.lists(st.tuples(clusters, st.integers(0, 900)), max_size=30), st.lists(st.tuples(clusters, st.integers(1, 900)))
)
def test_many_answers_are_expected_as_each_is(
    observed: list[tuple[Cluster, int]], asked: list[tuple[Cluster, int]]
) -> None:
    lengths = ExpectedLengths()
    for cluster, tokens in observed:
        lengths.observe(cluster, tokens)
    found = lengths.of(asked)
    for (cluster, limit), mean, likely, tail in zip(asked, *(each.tolist() for each in found), strict=True):
        assert mean == pytest.approx(lengths.mean(cluster, limit))
        alone = lengths.of([(cluster, limit)])
        assert [likely, tail] == pytest.approx([alone.likely[0], alone.tails[0]])
        assert 0.0 < mean <= limit + 1e-9
        assert 0.0 < likely <= tail + 1e-9
        assert tail <= limit


def test_nothing_is_known_but_the_limit() -> None:
    lengths, cluster = ExpectedLengths(), ExpectedLengths.cluster(100)
    assert lengths.mean(cluster, 50) == 50.0
    assert lengths.of([(cluster, 50)]).tails[0] == pytest.approx(50.0, rel=0.15)
    assert [len(each) for each in lengths.of([])] == [0, 0, 0]


def test_a_narrow_template_falls_back_on_the_broader_one_and_that_on_all() -> None:
    lengths = ExpectedLengths()
    system, task, other = Template(1, 1), Template(2, 5), Template(3, 5)
    for _ in range(50):
        lengths.observe(ExpectedLengths.cluster(100, task, system), 20)
        lengths.observe(ExpectedLengths.cluster(100), 400)
    narrow, sibling, elsewhere = (
        lengths.mean(ExpectedLengths.cluster(100, *each), 1000)
        for each in ((task, system), (other, system), (other, None))
    )
    assert narrow < 25.0
    assert sibling < 35.0
    assert elsewhere > 150.0


def test_the_tail_is_the_length_that_hardly_any_exceeds() -> None:
    lengths, cluster = ExpectedLengths(), ExpectedLengths.cluster(10)
    for number in range(5000):
        lengths.observe(cluster, 200 if number % 100 == 0 else 20)
    (mean,), (likely,), (tail,) = lengths.of([(cluster, 1000)])
    assert 18.0 < mean < 30.0
    assert 17.0 < likely < 24.0
    assert 170.0 < tail < 240.0
