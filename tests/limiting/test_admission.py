"""Who is let in when capacity is short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchwright.errors import InvalidRequest, Overloaded
from batchwright.limiting.admission import AdmissionController, Size
from batchwright.limiting.estimates import completions_of_request, prompt_tokens_of_request, sequences_of_request
from batchwright.request import Flow
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL


class Admissions(RuleBasedStateMachine):
    """Owners come and go at random; what is held is what was admitted, and a newcomer always finds room."""

    @initialize(sequences=st.integers(2, 200), tokens=st.integers(2, 5000))
    def begin(self, sequences: int, tokens: int) -> None:
        self.admission = AdmissionController(Size(sequences, tokens))
        self.inside: list[tuple[Flow, Size]] = []
        self.now = 0.0

    @rule(
        owner=st.integers(0, 4),
        weight=st.sampled_from([0.25, 1.0, 4.0]),
        sequences=st.integers(1, 120),
        tokens=st.integers(0, 3000),
    )
    def ask(self, owner: int, weight: float, sequences: int, tokens: int) -> None:
        flow, size = Flow(str(owner), "", weight), Size(sequences, tokens)
        try:
            self.admission.admit(flow, size, self.now)
        except InvalidRequest:
            capacity = self.admission.capacity
            assert sequences > capacity.sequences // 2 or tokens > capacity.tokens // 2
        except Overloaded:
            assert self.inside
        else:
            self.inside.append((flow, size))

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 1000), seconds=st.floats(0.0, 100.0))
    def leave(self, which: int, seconds: float) -> None:
        self.now += seconds
        flow, size = self.inside.pop(which % len(self.inside))
        self.admission.release(flow, size, self.now)

    @invariant()
    def counts_are_right(self) -> None:
        held = sum((size for _, size in self.inside), Size(0, 0))
        assert self.admission.held == held
        assert self.admission.capacity.covers(held)
        for owner in {flow.owner for flow, _ in self.inside}:
            mine = sum((size for flow, size in self.inside if flow.owner == owner), Size(0, 0))
            assert self.admission.held_by(owner) == mine
        assert self.admission.held_by("nobody") == Size(0, 0)


TestAdmissions = Admissions.TestCase
TestAdmissions.settings = settings(max_examples=60, stateful_step_count=30)


@given(sizes=st.lists(st.integers(1, 2048), max_size=60))
@settings(max_examples=100)
def test_whatever_one_owner_asks_for_another_gets_in(sizes: list[int]) -> None:
    admission = AdmissionController(Size(4096, 10**9))
    for size in sizes:
        try:
            admission.admit(Flow("greedy", ""), Size(size, 1), 0.0)
        except Overloaded:
            continue
    admission.admit(Flow("modest", ""), Size(1, 1), 0.0)
    assert admission.held.sequences <= 2049


def test_an_owner_with_a_large_request_inside_still_gets_small_ones_in() -> None:
    admission = AdmissionController(Size(4096, 10**9))
    flow = Flow("a", "")
    admission.admit(flow, Size(2000, 1), 0.0)
    with pytest.raises(Overloaded, match="for you: there is no room for 2,000 more"):
        admission.admit(flow, Size(2000, 1), 0.0)
    for _ in range(30):
        admission.admit(flow, Size(1, 1), 0.0)


def _refused(admission: AdmissionController, flow: Flow, size: Size, now: float) -> float:
    with pytest.raises(Overloaded) as raised:
        admission.admit(flow, size, now)
    assert raised.value.retry_after is not None
    return raised.value.retry_after


def test_an_idle_hour_says_little_about_how_long_a_burst_takes() -> None:
    admission = AdmissionController(Size(256, 10**9))
    flow = Flow("a", "")
    admission.admit(flow, Size(1, 1), 0.0)
    admission.release(flow, Size(1, 1), 1.0)
    for _ in range(127):
        admission.admit(flow, Size(1, 1), 3600.0)
    for number in range(100):
        admission.release(flow, Size(1, 1), 3600.0 + 0.01 * number)
        admission.admit(flow, Size(1, 1), 3600.0 + 0.01 * number)
    assert _refused(admission, flow, Size(2, 1), 3601.0) < 5.0


def test_a_request_that_waits_for_tokens_waits_for_as_many_sequences_as_have_them() -> None:
    admission = AdmissionController(Size(1000, 1000))
    flow = Flow("a", "")
    for _ in range(40):
        admission.admit(flow, Size(1, 10), 0.0)
    for second in range(1, 11):
        admission.release(flow, Size(1, 10), float(second))
        admission.admit(flow, Size(1, 10), float(second))
    small, large = (_refused(admission, flow, Size(1, tokens), 10.0) for tokens in (300, 480))
    assert small == pytest.approx(30.0, rel=0.3)
    assert large == pytest.approx(40.0, rel=0.3), "then all have left"


def test_requests_of_their_own_owners_fill_the_capacity_and_never_all_of_it() -> None:
    """As where no keys are used: one large request leaves half to the others, and each of these leaves something."""
    admission = AdmissionController(Size(4096, 10**9))
    admission.admit(Flow("0", "0"), Size(2048, 1), 0.0)
    admitted = 0
    for number in range(1, 4096):
        try:
            admission.admit(Flow(str(number), ""), Size(1, 1), 0.0)
            admitted += 1
        except Overloaded:
            break
    assert admitted == 2047


def test_a_greater_weight_may_hold_more() -> None:
    def most(weight: float) -> int:
        admission = AdmissionController(Size(1000, 10**9))
        flow = Flow("a", "", weight)
        while True:
            try:
                admission.admit(flow, Size(1, 1), 0.0)
            except Overloaded:
                return admission.held.sequences

    assert abs(most(1.0) - 500) <= 2
    assert abs(most(4.0) - 800) <= 4
    assert abs(most(0.25) - 200) <= 2


def test_the_time_to_wait_is_what_the_last_departures_took() -> None:
    admission = AdmissionController(Size(4, 100))
    flow = Flow("a", "")
    admission.admit(flow, Size(1, 1), 0.0)
    admission.admit(Flow("b", ""), Size(1, 1), 0.0)
    admission.release(flow, Size(1, 1), 0.0)
    for second in (2.0, 4.0, 6.0):
        admission.admit(flow, Size(1, 1), second)
        admission.release(flow, Size(1, 1), second)
    admission.admit(flow, Size(1, 1), 6.0)
    with pytest.raises(Overloaded) as caught:
        admission.admit(flow, Size(2, 1), 6.0)
    assert caught.value.retry_after == pytest.approx(2 * 2.0, rel=0.4)


@pytest.mark.parametrize(("size", "message"), [(Size(2049, 1), "2,049 completions"), (Size(1, 501), "some 501 tokens")])
def test_what_could_never_be_let_in_is_invalid(size: Size, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        AdmissionController(Size(4096, 1000)).admit(Flow("a", ""), size, 0.0)


@pytest.mark.parametrize(
    ("endpoint", "body", "sequences", "completions", "tokens"),
    [
        (COMPLETION_URL, {"prompt": "x" * 40}, 1, 1, 10),
        (COMPLETION_URL, {"prompt": ["abcd", "e"], "n": 3}, 6, 3, 2),
        (COMPLETION_URL, {"prompt": [1, 2, 3]}, 1, 1, 3),
        (COMPLETION_URL, {"prompt": [[1, 2], [3]], "n": 2}, 4, 2, 3),
        (EMBEDDINGS_URL, {"input": ["a", "b"], "n": 7}, 2, 1, 2),
        (CHAT_URL, {"messages": [{"role": "user", "content": "x" * 8}], "n": 2}, 2, 2, 2),
        (CHAT_URL, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 8}]}]}, 1, 1, 2),
        (COMPLETION_URL, {"prompt": None, "n": "many"}, 1, 1, 0),
        (CHAT_URL, {"messages": "none", "n": -1}, 1, 1, 1),
        (COMPLETION_URL, {"prompt": [{"a": 1}]}, 1, 1, 0),
        (CHAT_URL, {}, 1, 1, 0),
        # What an endpoint elsewhere may overlook hides nothing.
        (CHAT_URL, {"messages": [{"content": "x" * 8}], "n": 3, "input": "y"}, 3, 3, 2),
        (EMBEDDINGS_URL, {"input": ["a", "b"], "messages": []}, 2, 1, 2),
    ],
)
def test_the_size_of_a_request(
    endpoint: str, body: dict[str, object], sequences: int, completions: int, tokens: int
) -> None:
    asked = endpoint, body
    found = sequences_of_request(*asked), completions_of_request(*asked), prompt_tokens_of_request(*asked)
    assert found == (sequences, completions, tokens)
