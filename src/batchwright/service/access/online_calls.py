"""Online calls, which are admitted while there is room and the service is not stopping."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from batchwright.clock import Clock
from batchwright.errors import Overloaded, ServiceStopping
from batchwright.inference.calls import closing
from batchwright.inference.inference import Call
from batchwright.limiting.admission import AdmissionController, Size
from batchwright.limiting.estimates import completions_of_request, prompt_tokens_of_request, sequences_of_request
from batchwright.request import Flow
from batchwright.service.observability.measured import MeasuredInference


class OnlineCalls:
    """Online calls of this process: computes those that `admission` admits, and refuses others rather than be late."""

    def __init__(self, inference: MeasuredInference, admission: AdmissionController, clock: Clock) -> None:
        self.closed = False
        """Whether the service is stopping: admitted calls are answered, new ones refused."""
        self.inside = 0
        """Number of admitted requests."""
        self.admission = admission
        self._inference = inference
        self._clock = clock

    async def answer(self, call: Call) -> dict[str, Any]:
        """Do as `Inference.answer`. Raises `Overloaded`, or `ServiceStopping` when the service is stopping."""
        with self.admitted([call]):
            return await self._inference.answer(call)

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """Do as `Inference.stream`. Raises the same errors as `answer`."""
        with self.admitted([call]):
            async with closing(self._inference.stream(call)) as bodies:
                async for body in bodies:
                    yield body

    @contextmanager
    def admitted(self, calls: list[Call]) -> Iterator[None]:
        """Reserve capacity for the calls of one request during the block. Raises the same errors as `answer`."""
        flow = calls[0].flow or Flow(calls[0].request_id, calls[0].request_id)
        size = sum(map(_size, calls), Size(0, 0))
        try:
            if self.closed:
                raise ServiceStopping
            self.admission.admit(flow, size, self._clock.now())
        except (Overloaded, ServiceStopping) as error:
            for call in calls:
                self._inference.refused(call, error)
            raise
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.admission.release(flow, size, self._clock.now())


def _size(call: Call) -> Size:
    asked = call.endpoint, call.body
    # Each completion of a prompt counts its tokens.
    return Size(sequences_of_request(*asked), prompt_tokens_of_request(*asked) * completions_of_request(*asked))
