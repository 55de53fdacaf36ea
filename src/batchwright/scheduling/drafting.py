"""Drafts: guesses at a sequence's next tokens, so that one step can compute several of them.

A step of few rows takes hardly less time than reading the weights, and further rows cost little. So a decoding sequence
may add its likely next tokens: those that followed the last occurrence of its last few tokens (prompt lookup decoding),
in itself or else in an ended answer of the same owner. The model computes the guesses as if they were known and chooses
a token after each, so a wrong guess costs a row and changes nothing: the tokens are those that it would have chosen one
by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from batchwright.request import Flow

_SIZES = (4, 2)
"""Numbers of tokens that must match, the stronger evidence first."""
_FIRST = 4
"""Number of guesses at a time, until it is known how good they are."""
_KEPT_TOKENS = 8_192
"""Most tokens of ended answers that are kept of an owner: the latest ones, and at least half as many. With their index,
they take up to 2.5 MB."""
_MOST_OWNERS = 16
_END = -1
"""Token behind each ended answer. No vocabulary has it."""


class _RunIndex:
    """Index of where each run of a few tokens last occurred in a list that only grows."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Index what has been appended to `tokens` since the last call."""
        for size in _SIZES:
            for place in range(max(size, self._indexed), len(tokens)):
                if tokens[place] != _END:
                    self._places[tuple(tokens[place - size : place])] = place
        self._indexed = len(tokens)

    def place_after(self, run: Sequence[int]) -> int | None:
        """Return the place of the token that followed `run` the last time that one did."""
        return self._places.get(tuple(run))


class _Answers:
    """Some ended answers, one after another."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._runs = _RunIndex()

    def add(self, answer: Sequence[int]) -> None:
        """Append an answer."""
        self.tokens += [*answer, _END]
        self._runs.extend(self.tokens)

    def after(self, run: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the last occurrence of `run`."""
        place = self._runs.place_after(run)
        if place is None:
            return []
        following = self.tokens[place : place + most]
        return following[: following.index(_END)] if _END in following else following


class EndedAnswers:
    """The latest answers of one owner that have ended."""

    def __init__(self, kept_tokens: int = _KEPT_TOKENS) -> None:
        self._half = kept_tokens // 2
        self._latest, self._earlier = _Answers(), _Answers()

    def add(self, answer: Sequence[int]) -> None:
        """Add the tokens of an answer, or the last of them if there are too many to be kept."""
        if len(answer) <= min(_SIZES):
            return  # nothing follows a run of it
        if len(self._latest.tokens) + len(answer) > self._half:
            self._latest, self._earlier = _Answers(), self._latest
        self._latest.add(answer[-self._half :])

    def after(self, run: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed `run` in one of the answers."""
        return self._latest.after(run, most) or self._earlier.after(run, most)


class EndedAnswersByOwner:
    """The ended answers of each of the latest owners of flows. No owner's drafts depend on the answers of others."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, EndedAnswers] = OrderedDict()

    def of(self, flow: Flow | None) -> EndedAnswers | None:
        """Return the answers of the flow's owner, to read and to add to.

        Requests without a flow have one owner together. A request that is its own owner shares nothing: None.
        """
        owner = "" if flow is None else flow.owner
        if flow is not None and owner == flow.request:
            return None
        answers = self._of.setdefault(owner, EndedAnswers())
        self._of.move_to_end(owner)
        if len(self._of) > _MOST_OWNERS:
            self._of.popitem(last=False)
        return answers


class Drafter:
    """Draft maker for one sequence of tokens, which may only grow."""

    def __init__(self, ended: EndedAnswers | None = None) -> None:
        """`ended`: other answers from which it guesses, and to which that of its sequence is added."""
        self._ended = ended
        self._runs = _RunIndex()
        self._length = _FIRST

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that may follow `tokens`."""
        return next(self.guesses(tokens, most), [])

    def guesses(self, tokens: Sequence[int], most: int) -> Iterator[list[int]]:
        """Yield what may follow `tokens`, at most `most` tokens each, the likeliest first.

        The sequence's own past comes before ended answers, even with a shorter run: measured.
        """
        self._runs.extend(tokens)
        known, most = len(tokens), min(most, self._length)
        runs = [tokens[known - size :] for size in _SIZES if known >= size]
        for run in runs:
            place = self._runs.place_after(run)
            if place is not None:
                drafts: list[int] = []
                for at in range(place, place + most):
                    # In a repetition, the copied tokens may themselves be guesses.
                    drafts.append(tokens[at] if at < known else drafts[at - known])
                yield drafts
        if self._ended is not None:
            for run in runs:
                if following := self._ended.after(run, most):
                    yield following

    def settle(self, drafted: int, accepted: int) -> None:
        """Learn that the first `accepted` of `drafted` guesses were right, to guess more or fewer next time."""
        self._length = 2 * max(drafted, self._length) if accepted == drafted else accepted + 1

    def share(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Let the drafters of other sequences guess from the answer in `tokens`, after the first `num_prompt`.

        The sequence must have ended, and all its tokens be known. The last tokens of the prompt are kept with the
        answer: they are what its first tokens follow.
        """
        if self._ended is not None and len(tokens) > num_prompt:
            self._ended.add(tokens[max(0, num_prompt - max(_SIZES)) :])
