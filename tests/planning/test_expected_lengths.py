"""What is expected of answers, compared with what one histogram after the other says."""

from __future__ import annotations

import math
from collections import Counter

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


def _told(observed: list[tuple[Cluster, int]], cluster: Cluster, limit: int) -> list[float]:
    """Mean and tail, from the answers that each level has, from the broadest to the narrowest."""
    ends = [1.15**number for number in range(90)]

    def bin_of(tokens: int) -> int:
        return next(number for number, end in enumerate(ends) if tokens <= end * (1 + 1e-12))

    coarse = math.floor(cluster.size * math.log(1.05) / math.log(2))
    size = (coarse, cluster.size)

    def of(template: Template | None, *wanted: int) -> list[int]:
        found = []
        for each, tokens in observed:
            its = (math.floor(each.size * math.log(1.05) / math.log(2)), each.size)
            # An answer counts for each template that its line has.
            if template in (each.template, each.broader) and its[: len(wanted)] == wanted:
                found.append(tokens)
        return found

    levels = [[tokens for _, tokens in observed]]
    if cluster.broader is not None:
        levels += [of(cluster.broader), of(cluster.broader, size[0])]
    if cluster.template is not None:
        levels.append(of(cluster.template))
        levels += [of(cluster.template, size[0]), of(cluster.template, *size)]
    else:
        alone = [(each, tokens) for each, tokens in observed if each.template is None]
        for wanted in (size[:1], size):
            levels.append(
                [
                    tokens
                    for each, tokens in alone
                    if (math.floor(each.size * math.log(1.05) / math.log(2)), each.size)[: len(wanted)] == wanted
                ]
            )
    shares = [float(number == bin_of(limit)) for number in range(90)]
    for level in levels:
        if level:
            counts = Counter(map(bin_of, level))
            shares = [(counts[number] + 4 * share) / (len(level) + 4) for number, share in enumerate(shares)]
    mean = sum(share * min(end, limit) for share, end in zip(shares, ends, strict=True))
    beyond = 0.005
    longer = [sum(shares[number:]) for number in range(90)]
    last = max(number for number in range(90) if longer[number] > beyond)
    inside = min(1.0, (longer[last] - beyond) / shares[last])
    return [mean, min(limit, ends[last] * (1 + 0.15 * inside) / 1.15)]


# Templates and broader ones have different numbers, as those of one line have different lengths.
@given(
    st.lists(st.tuples(clusters, st.integers(1, 900)), max_size=30),
    st.lists(st.tuples(clusters, st.integers(1, 900)), max_size=8),
)
def test_lengths_are_those_of_the_histograms(
    observed: list[tuple[Cluster, int]], asked: list[tuple[Cluster, int]]
) -> None:
    lengths = ExpectedLengths()
    for cluster, tokens in observed:
        lengths.observe(cluster, tokens)
    found = lengths.of(asked)
    for (cluster, limit), *told in zip(asked, *(each.tolist() for each in found), strict=True):
        assert told == pytest.approx(_told(observed, cluster, limit), rel=1e-6)
        assert told[0] == pytest.approx(lengths.mean(cluster, limit))


def test_nothing_is_known_but_the_limit() -> None:
    lengths, cluster = ExpectedLengths(), ExpectedLengths.cluster(100)
    assert lengths.mean(cluster, 50) == 50.0
    assert lengths.of([(cluster, 50)]).tails[0] == pytest.approx(50.0, rel=0.15)
    assert [len(each) for each in lengths.of([])] == [0, 0]


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
    (mean,), (tail,) = lengths.of([(cluster, 1000)])
    assert 18.0 < mean < 30.0
    assert 170.0 < tail < 240.0
