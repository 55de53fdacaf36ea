"""`CommonFailure`: the first lines of a run all fail for one reason, for which the job is to blame. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from batchwright.errors import EndpointError, InvalidRequest, RunFailed
from batchwright.request import SamplingParams
from batchwright.wire.fields import ANSWER_LIMITS

_ENOUGH = 20
"""Failed lines after which the others are assumed to fail for the same reason."""
SAMPLING_FLAGS = {each.name: f"--{each.name.replace('_', '-')}" for each in fields(SamplingParams)} | {
    "schema": "--json-schema"
}
"""Flags of `batchwright run` by the names of sampling parameters."""
_ABOUT_FIELDS = frozenset({400, 422})
"""Statuses with which an endpoint says that a field is missing, or is not what it takes."""


@dataclass(frozen=True, slots=True)
class _Reason:
    """A reason for which the job is to blame."""

    what: str
    """The field that is to blame."""
    code: str
    remedy: str


class CommonFailure:
    """Decides whether the run should end because all of its first lines failed for a reason of the job.

    That is a model that the endpoint does not have, or a field that is missing or not accepted, where the job's flags
    give it and not the line. `defaults`: the parameters that the job's flags give to all lines.
    """

    def __init__(self, defaults: SamplingParams | Mapping[str, Any]) -> None:
        self._defaults = defaults
        self._reason: _Reason | None = None
        self._latest: Exception | None = None
        self._count = 0
        self._is_over = False

    def is_that_of(self, body: Mapping[str, object], error: Exception) -> bool:
        """Note that the line with this body failed, and return whether all lines may fail like this."""
        reason = None if self._is_over else _reason_of(body, error, self._defaults)
        if reason is None or self._reason not in (None, reason):
            self._is_over = True
            return False
        self._reason, self._latest = reason, error
        self._count += 1
        return True

    def end(self) -> None:
        """Note that a line was answered."""
        self._is_over = True

    @property
    def is_enough(self) -> bool:
        """Whether so many lines failed that the others would, too."""
        return self._count >= _ENOUGH

    @property
    def error(self) -> RunFailed:
        """The error with which the run ends."""
        assert self._reason is not None
        lines = "the line fails" if self._count == 1 else f"the first {self._count:,} lines all fail for one reason"
        return RunFailed(
            f"{lines}: {str(self._latest).rstrip('. ')}. {self._reason.remedy}; nothing is written of lines that "
            "failed so, and the same command with that computes them"
        )


def _reason_of(
    body: Mapping[str, object], error: Exception, defaults: SamplingParams | Mapping[str, Any]
) -> _Reason | None:
    """Return why the job is to blame for the `error` of a line with this body; None if the line is to blame."""
    if isinstance(error, EndpointError):
        reported = error.body or {}
        param, code = reported.get("param"), f"{error.status} {reported.get('code')}"
        if error.is_no_such_model:
            param = "model"
        elif error.status not in _ABOUT_FIELDS:
            return None
    elif isinstance(error, InvalidRequest):
        param, code = error.param, error.code
    else:
        return None
    if not isinstance(param, str) or body.get(param) is not None:
        return None
    if param == "model":
        return _Reason("model", code, "Name a model that the endpoint has with --model")
    name = "max_tokens" if param in ANSWER_LIMITS else param
    if name not in SAMPLING_FLAGS or (name != param and body.get(name) is not None):
        return None
    if not isinstance(defaults, Mapping) or defaults.get(name) is not None:
        return _Reason(param, code, f"Change {SAMPLING_FLAGS[name]}, or leave it out")
    return _Reason(param, code, f"Give it for all lines with {SAMPLING_FLAGS[name]}")
