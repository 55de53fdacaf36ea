"""`EndpointPool`: several endpoints, or several keys of one, that share the calls by what each has room for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from batchwright.errors import EndpointDown, EndpointError
from batchwright.inference.calls import closing
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.inference import Call, Route
from batchwright.pacing.pacer import PacerFigures

_log = logging.getLogger(__name__)
_REFUSES_THE_KEY = frozenset({401, 403})


class EndpointPool(Route):
    """Gives each call to the member that could send it soonest. All must serve the models that calls name.

    A member that is down gets no calls while others are up. One that refuses its key, or whose quota is used up, gets
    none any more, and its calls go to the others; the last one's error is that of the call.
    """

    def __init__(self, members: Sequence[EndpointInference]) -> None:
        """Raises ValueError without members."""
        if not members:
            raise ValueError("members: give at least one")
        self._members = list(members)
        self._in = list(members)
        """Members that still get calls."""

    @property
    def endpoints(self) -> Collection[str]:
        return frozenset.intersection(*(frozenset(member.endpoints) for member in self._members))

    @property
    def models(self) -> Sequence[str]:
        first, *others = (member.models for member in self._in)
        return [name for name in first if all(name in other for other in others if other)]

    @property
    def room(self) -> int:
        return sum(member.room for member in self._in)

    @property
    def why_not_ready(self) -> str | None:
        """Reason why no member can compute a call now; None when one can."""
        reasons = [member.why_not_ready for member in self._in]
        return reasons[0] if all(reasons) else None

    def pacing(self) -> Mapping[str, PacerFigures]:
        """Return what was found of the limits of each member, by its number, its address and the model."""
        return {
            f"{number} {member.address} {model}".rstrip(): figures
            for number, member in enumerate(self._members, 1)
            for model, figures in member.pacing().items()
        }

    def send_no_more(self) -> None:
        """Give the batch calls that were not sent yet back to their owners."""
        for member in self._members:
            member.send_no_more()

    async def answer(self, call: Call) -> dict[str, Any]:
        while True:
            member = self._choose(call)
            try:
                return await member.answer(call)
            except (EndpointError, EndpointDown) as error:
                if not self._may_go_elsewhere(member, error):
                    raise

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        while True:
            member, has_begun = self._choose(call), False
            try:
                async with closing(member.stream(call)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
                return
            except (EndpointError, EndpointDown) as error:
                if has_begun or not self._may_go_elsewhere(member, error):
                    raise

    async def close(self) -> None:
        for member in self._members:
            await member.close()

    def _choose(self, call: Call) -> EndpointInference:
        up = [member for member in self._in if member.why_not_ready is None]
        return min(up or self._in, key=lambda member: member.wait_for(call))

    def _may_go_elsewhere(self, member: EndpointInference, error: EndpointError | EndpointDown) -> bool:
        """Return whether another member may be given a call that failed, and take out a member that is of no use."""
        if isinstance(error, EndpointDown):
            # One that stops sending gives its calls back, and so do the others.
            return member.why_not_ready is not None and self.why_not_ready is None
        if error.status not in _REFUSES_THE_KEY and not error.is_out_of_quota:
            return False
        others = [other for other in self._in if other is not member]
        if not others:
            return False
        if member in self._in:
            _log.warning("%s gets no more calls: %s", member.address, error)
            self._in = others
        return True
