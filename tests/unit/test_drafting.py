"""Guesses from a sequence's own past and from ended answers: what they may be, and how many."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from batchwright.kv import BlockManager
from batchwright.request import Flow
from batchwright.scheduling import Drafter, EndedAnswers, EndedAnswersByOwner, Scheduler, Sequence, StepPlan

tokens = st.lists(st.integers(0, 3), max_size=60)


@given(period=st.lists(st.integers(0, 9), min_size=1, max_size=6), turns=st.integers(5, 9), most=st.integers(1, 4))
def test_what_repeats_itself_is_guessed(period: list[int], turns: int, most: int) -> None:
    said = period * turns
    assert Drafter().draft(said, most) == [(period * (most + 1))[place] for place in range(most)]


@given(tokens, st.integers(1, 20))
def test_every_guess_followed_the_same_tokens_before(known: list[int], most: int) -> None:
    drafts = Drafter().draft(known, most)
    assert len(drafts) <= most
    if drafts:
        pairs = list(zip(known, known[1:], known[2:], strict=False))
        assert (*known[-2:], drafts[0]) in pairs


@given(tokens, st.lists(st.integers(1, 5), max_size=20))
def test_a_drafter_that_grows_along_guesses_like_a_new_one(known: list[int], stops: list[int]) -> None:
    growing, at = Drafter(), 0
    for stop in stops:
        at += stop
        assert growing.draft(known[:at], 4) == Drafter().draft(known[:at], 4)


def test_nothing_known_nothing_guessed() -> None:
    assert Drafter().draft([], 4) == []
    assert Drafter().draft([1, 2, 3, 4, 5], 4) == []


def test_right_guesses_make_more_and_wrong_ones_fewer() -> None:
    said = [1, 2, 3] * 20
    drafter = Drafter()
    assert len(drafter.draft(said, 100)) == 4
    drafter.settle(4, 4)
    assert len(drafter.draft(said, 100)) == 8
    drafter.settle(8, 2)
    assert len(drafter.draft(said, 100)) == 3
    drafter.settle(3, 0)
    assert len(drafter.draft(said, 100)) == 1
    drafter.settle(1, 1)
    assert len(drafter.draft(said, 100)) == 2


@given(st.lists(tokens, max_size=8), tokens, st.integers(1, 20), st.integers(8, 80))
def test_every_guess_from_ended_answers_followed_the_same_tokens_in_one_of_them(
    answers: list[list[int]], known: list[int], most: int, kept: int
) -> None:
    ended = EndedAnswers(kept)
    for answer in answers:
        ended.add(answer)
    drafts = Drafter(ended).draft(known, most)
    assert len(drafts) <= most
    if own := Drafter().draft(known, most):
        assert drafts == own
    elif drafts:
        wanted = [*known[-2:], *drafts]
        assert any(
            answer[at : at + len(wanted)] == wanted for answer in answers for at in range(len(answer) - len(wanted) + 1)
        )
    elif answers and len(known) >= 2:
        latest = answers[-1][-(kept // 2) :] if len(answers[-1]) > 2 else []
        assert (known[-2], known[-1]) not in list(pairwise(latest[:-1]))


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=30), st.integers(8, 80))
def test_the_latest_ended_answers_are_kept_and_no_more_than_that(answers: list[list[int]], kept: int) -> None:
    ended = EndedAnswers(kept)
    for answer in answers:
        ended.add(answer)
    held = [*ended._earlier.tokens, *ended._latest.tokens]
    assert sum(token >= 0 for token in held) <= kept
    said = [token for answer in answers if len(answer) > 2 for token in (*answer[-(kept // 2) :], -1)]
    assert held == said[len(said) - len(held) :]
    assert len(held) >= min(len(said), kept // 2)


def test_the_longer_match_goes_first_and_an_answer_is_not_followed_by_the_next() -> None:
    ended = EndedAnswers()
    ended.add([1, 2, 3, 4, 5, 6])
    ended.add([9, 9, 3, 4, 7, 8, 2, 3])
    assert Drafter(ended).draft([0, 1, 2, 3, 4], 8) == [5, 6]
    assert Drafter(ended).draft([0, 0, 0, 3, 4], 8) == [7, 8, 2, 3]
    assert Drafter(ended).draft([0, 0, 0, 5, 6], 8) == []
    assert Drafter(ended).draft([0, 0, 0, 2, 3], 8) == [4, 5, 6]


def test_no_guesses_from_the_answers_of_other_owners() -> None:
    ended = EndedAnswersByOwner()
    for flow in (Flow("a", "first"), None):
        answers = ended.of(flow)
        assert answers is not None
        answers.add([1, 2, 3] if flow else [1, 2, 4])
    assert Drafter(ended.of(Flow("a", "second"))).draft([1, 2], 4) == [3]
    assert Drafter(ended.of(Flow("b", "first"))).draft([1, 2], 4) == []
    assert Drafter(ended.of(None)).draft([1, 2], 4) == [4]
    assert ended.of(Flow("c", "c")) is None


def test_the_answers_of_the_latest_owners_are_kept() -> None:
    ended = EndedAnswersByOwner()
    for number in range(40):
        for owner in ("first", str(number)):
            answers = ended.of(Flow(owner, "request"))
            assert answers is not None
            answers.add([1, 2, 3])
        ended.of(Flow(f"alone {number}", f"alone {number}"))

    def drafts(owner: str) -> list[int]:
        return Drafter(ended.of(Flow(owner, "request"))).draft([1, 2], 4)

    assert drafts("first") == [3]
    assert drafts("39") == [3]
    assert drafts("0") == []


def test_a_sequence_that_ends_is_guessed_from_once() -> None:
    scheduler, ended = _scheduler(), EndedAnswers()
    sequence = Sequence([1, 2], 2, 100, drafter=Drafter(ended))
    _decode(scheduler, [sequence])
    sequence.tokens += [5, 6]
    scheduler.finish(sequence)
    scheduler.finish(sequence)
    assert ended._latest.tokens == [1, 2, 1, 5, 6, -1]
    assert Drafter(ended).draft([7, 1, 2], 4) == [1, 5, 6]


def test_a_sequence_without_an_answer_leaves_nothing() -> None:
    scheduler, ended = _scheduler(), EndedAnswers()
    sequence = Sequence([1, 2, 3, 4], 4, 100, drafter=Drafter(ended))
    scheduler.add(sequence)
    scheduler.finish(sequence)
    assert ended._latest.tokens == []


def _scheduler(blocks: int = 32, rows: int = 8) -> Scheduler:
    return Scheduler(BlockManager(blocks, 4), max_batch_tokens=64, max_num_seqs=8, draft_rows=rows)


def _repeating(total: int) -> Sequence:
    return Sequence([1, 2] * 4, 8, total, drafter=Drafter())


def _decode(scheduler: Scheduler, sequences: list[Sequence]) -> StepPlan:
    """The plan of the step after the prompts' own."""
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.commit(scheduler.schedule(0.0))
    for sequence in sequences:
        sequence.tokens.append(1)
    return scheduler.schedule(0.0)


def test_drafts_fill_a_step_up_to_its_free_rows() -> None:
    scheduler = _scheduler()
    plan = _decode(scheduler, [_repeating(100), _repeating(100), _repeating(100)])
    assert [len(chunk.drafts) for chunk in plan.chunks] == [1, 2, 2]
    assert plan.chunks[1].drafts == [2, 1]
    assert (plan.num_tokens, plan.num_rows) == (3, 8)


def test_no_draft_beyond_what_a_sequence_may_come_to() -> None:
    plan = _decode(_scheduler(), [_repeating(11)])
    assert plan.chunks[0].drafts == [2]
    plan = _decode(_scheduler(), [_repeating(10)])
    assert plan.chunks[0].drafts == []


def test_drafts_take_no_block_that_is_not_free() -> None:
    plan = _decode(_scheduler(blocks=3), [_repeating(12)])
    assert plan.chunks[0].drafts == [2, 1]
    scheduler = _scheduler(blocks=6)
    plan = _decode(scheduler, [Sequence([1, 2] * 4 + [1, 2, 1], 11, 24, drafter=Drafter()), _repeating(10)])
    assert not plan.preempted
    assert all(len(chunk.sequence.table) <= 3 for chunk in plan.chunks)


def test_an_accepted_draft_is_computed_and_shared() -> None:
    scheduler = _scheduler()
    sequence = _repeating(100)
    plan = _decode(scheduler, [sequence])
    assert plan.chunks[0].drafts == [2, 1, 2, 1]
    scheduler.commit(plan)
    for token in (2, 1, 2):
        sequence.tokens.append(token)
        scheduler.accept_draft(sequence)
    sequence.tokens.append(7)
    assert (sequence.num_computed, sequence.remaining) == (12, 1)
    scheduler.blocks.check([sequence.table])
    follower = Sequence([*sequence.tokens[:12], 5], 13, 20)
    scheduler.add(follower)
    scheduler.schedule(0.0)
    assert follower.num_cached == 12
