"""`EndpointPool`: several endpoints, or several keys of one, that share the calls according to their capacity."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.errors import EndpointDown, EndpointError
from batchwright.inference.calls import closing
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.inference import Call, Route
from batchwright.pacing.figures import PacerFigures
from batchwright.wire.requests import read_model

_log = logging.getLogger(__name__)


class EndpointPool(Route):
    """Gives each call to the member that can send it soonest, among those that have its model.

    A call that names no model is for the first model that all members have. A member that is down gets no calls while
    others are up. A member that refuses its key, whose quota is used up, or whose address has no such API gets no more
    calls; a member that does not have a model gets none for it. Their calls go to the others; if all fail, the call
    raises the last member's error.
    """

    def __init__(self, members: Sequence[EndpointInference]) -> None:
        """Raises ValueError if there are no members."""
        if not members:
            raise ValueError("members: give at least one")
        self._members = list(members)
        self._in = list(members)
        """Members that are still used."""
        self._accepted: set[EndpointInference] = set()
        """Members that have answered a call, and so accept their key: a refusal is then about the call."""
        self._answered: set[tuple[EndpointInference, str | None]] = set()
        """Members and models for which they have answered a call."""
        self._lacking: set[tuple[EndpointInference, str | None]] = set()
        """Members and models that they have said they do not have."""

    @property
    def endpoints(self) -> Collection[str]:
        return frozenset.intersection(*(frozenset(member.endpoints) for member in self._members))

    @property
    def models(self) -> Sequence[str]:
        known = [member.models for member in self._members if member.models]
        return [name for name in known[0] if all(name in each for each in known)] if known else []

    @property
    def room(self) -> int:
        return sum(member.room for member in self._in)

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no member can compute a call now; None if one can."""
        reasons = [member.why_not_ready for member in self._in]
        return reasons[0] if all(reasons) else None

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what was learned about the limits of each member, by its number, its address and the model."""
        return {
            f"{number} {member.address} {model}".rstrip(): figures
            for number, member in enumerate(self._members, 1)
            for model, figures in member.pacing().items()
        }

    def send_no_more(self) -> None:
        """Return batch calls that have not been sent yet to their owners."""
        for member in self._members:
            member.send_no_more()

    async def answer(self, call: Call) -> dict[str, Any]:
        call = self._naming_its_model(call)
        while True:
            member = self._choose(call)
            try:
                answer = await member.answer(call)
                self._note_answer(member, call)
                return answer
            except (EndpointError, EndpointDown) as error:
                if not self._may_go_elsewhere(call, member, error):
                    raise

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        call = self._naming_its_model(call)
        while True:
            member, has_begun = self._choose(call), False
            try:
                async with closing(member.stream(call)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        self._note_answer(member, call)
                        yield chunk
                return
            except (EndpointError, EndpointDown) as error:
                if has_begun or not self._may_go_elsewhere(call, member, error):
                    raise

    async def close(self) -> None:
        for member in self._members:
            await member.close()

    def _naming_its_model(self, call: Call) -> Call:
        if read_model(call.body) is not None or not (models := self.models):
            return call
        return replace(call, body={**call.body, "model": models[0]})

    def _able(self, call: Call) -> Sequence[EndpointInference]:
        """Return the members that have the model of `call`; if none has it, all members, which will say so."""
        model = read_model(call.body)
        able = [member for member in self._in if not member.models or model in member.models] or self._in
        return [member for member in able if (member, model) not in self._lacking] or able

    def _note_answer(self, member: EndpointInference, call: Call) -> None:
        self._accepted.add(member)
        self._answered.add((member, read_model(call.body)))

    def _choose(self, call: Call) -> EndpointInference:
        able = self._able(call)
        up = [member for member in able if member.why_not_ready is None]
        return min(up or able, key=lambda member: member.wait_for(call))

    def _may_go_elsewhere(self, call: Call, member: EndpointInference, error: EndpointError | EndpointDown) -> bool:
        """Return whether another member may get a call that failed, and take out a member that is of no use."""
        others = [other for other in self._able(call) if other is not member]
        if isinstance(error, EndpointDown):
            # At the end of a run, when no member sends anything more, calls go back to their owners.
            is_of_no_use = member not in self._in or member.why_not_ready is not None
            return is_of_no_use and any(other.why_not_ready is None for other in others)
        if not others:
            return False
        if error.is_no_such_model:
            return self._may_go_to_one_with_the_model(call, member, error)
        refuses_key = error.status == 401 or (error.status == 403 and member not in self._accepted)
        is_nothing = (error.is_no_such_path or error.is_wrong_address) and member not in self._accepted
        if not refuses_key and not is_nothing and not error.is_out_of_quota:
            return False
        self._take_out(member, error)
        return True

    def _may_go_to_one_with_the_model(self, call: Call, member: EndpointInference, error: EndpointError) -> bool:
        """Return whether another member may have the model of `call`, which `member` does not have."""
        model = read_model(call.body)
        if (member, model) in self._answered:
            return False  # whatever it means, it is about this call
        if (member, model) not in self._lacking:
            self._lacking.add((member, model))
            if member.models and all((member, each) in self._lacking for each in member.models):
                self._take_out(member, error)
            else:
                _log.warning("%s gets no more calls for the model %s: %s", member.address, model, error)
        return any((other, model) not in self._lacking for other in self._able(call))

    def _take_out(self, member: EndpointInference, error: EndpointError) -> None:
        if member in self._in:
            _log.warning("%s gets no more calls: %s", member.address, error)
            self._in.remove(member)
            member.send_no_more()
