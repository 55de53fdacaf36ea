"""Errors of the public API.

Each names what was wrong, the value, and the remedy. `code` is the stable, machine-readable name, which error lines of
a batch output contain.
"""

from __future__ import annotations

import re
import reprlib

_SHOWN_CHARACTERS = 100
_SHOWN_ITEMS = 8
_MODEL_MISSING = re.compile(
    r"\bmodels?\b.*(not found|not exist|no access|not have access|not available|not supported|not a valid|not served)"
    r"|(invalid|unknown|no such) model|not a valid model|^model:",
    re.IGNORECASE | re.DOTALL,
)
"""Messages of several providers for a model that they do not have, or not for this key."""
_MODEL_CODES = frozenset({"model_not_found", "model_not_available", "invalid_model", "model_not_exist"})
_PASSING_STATUSES = frozenset({408, 409, 425, 429})
"""Statuses below 500 with which an endpoint refuses a call only for the moment."""
_PAYMENT_REQUIRED = 402
_OUT_OF_QUOTA = frozenset(
    {"insufficient_quota", "billing_hard_limit_reached", "billing_not_active", "billing_error", "insufficient_balance"}
)
"""Codes and types of errors, of several providers, that only a payment resolves."""
_NO_SUCH_PATH = frozenset({"not found", "method not allowed", "file not found"})
"""Messages, in lower case, of web frameworks and of llama.cpp's server for paths that they do not know."""
_UNKNOWN_URL = "unknown_url"
_INVALID_URL = "invalid url ("
"""Code, and beginning of the message in lower case, for such paths from OpenAI's API and those that copy it."""


class BatchwrightError(Exception):
    """Base of every error raised on purpose by batchwright."""

    code = "internal_error"


class InvalidRequest(BatchwrightError, ValueError):
    """A request that can never be served as written.

    `param` is the offending field (`"temperature"`, `"prompt"`, ...), or None when no single field is at fault.
    """

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens exceed what the model or the KV cache can hold."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, param: str | None = "prompt") -> None:
        super().__init__(message, param=param)


class ModelNotFound(BatchwrightError, LookupError):
    """A model name, path or hub id that leads to no model."""

    code = "model_not_found"


class UnsupportedModel(BatchwrightError):
    """The model exists, but its architecture or format cannot be run correctly here."""

    code = "unsupported_model"


class DownloadError(BatchwrightError):
    """A model could not be fetched, or what was fetched does not match its checksum."""

    code = "download_failed"


class ModelCacheError(BatchwrightError):
    """The model cache folder cannot be written: no space, no permission, no such disk."""

    code = "model_cache_failed"


class MissingExtra(BatchwrightError, ImportError):
    """A feature needs an optional part of the package that is not installed; the message says which."""

    code = "missing_extra"

    @classmethod
    def of_engine(cls, what: str, error: ModuleNotFoundError) -> MissingExtra:
        """Return the error that `what` needs a module that was not found, which comes with the extra `engine`."""
        return cls(f"{what} needs {error.name}; install it: pip install 'batchwright[engine]'")

    @classmethod
    def of_report(cls, what: str, error: ModuleNotFoundError) -> MissingExtra:
        """Return the error that `what` needs a module that was not found, which comes with the extra `report`."""
        return cls(f"{what} needs {error.name}; install it: pip install 'batchwright[report]'")


class GenerationError(BatchwrightError):
    """One request failed while it was being computed; others were not affected."""

    code = "generation_failed"


class NonFiniteLogits(GenerationError):
    """The model produced NaN or infinite logits for this request."""

    code = "non_finite_logits"


class OutOfMemory(GenerationError):
    """This request does not fit in memory even when it is computed alone."""

    code = "out_of_memory"


class Crashed(BatchwrightError):
    """Replicas of the model died while computing this request, in every attempt that is made."""

    code = "crashed"


class DeadlineExceeded(BatchwrightError, TimeoutError):
    """The request's deadline passed before it was finished, or was certain to pass and it was refused at once.

    `predicted_ms` is the least latency that a refused request would have had; None when the deadline did pass.
    """

    code = "deadline_exceeded"

    def __init__(self, message: str, *, predicted_ms: float | None = None) -> None:
        super().__init__(message)
        self.predicted_ms = predicted_ms


class Overloaded(BatchwrightError):
    """The queue is full and the request was not accepted, or the model is down and the request was not computed.

    `retry_after` is the number of seconds in which what waits now will have been computed, at the learned rate; after
    an outage, the number of seconds until a retry. None while nothing has been learned.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(BatchwrightError):
    """A tenant or a key has used up its allowance for now, or has no room left.

    `quota` is the name of the field of `Quotas`. `kind` is the type of the error in its body: `requests`, `tokens` or
    `insufficient_quota`. `passing`: whether time alone makes room, after about `retry_after` seconds where that is
    known.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        quota: str,
        kind: str = "requests",
        code: str | None = None,
        passing: bool = True,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.quota = quota
        self.kind = kind
        self.passing = passing
        self.retry_after = retry_after
        if code is not None:
            self.code = code


class Cancelled(BatchwrightError):
    """The caller cancelled the request."""

    code = "cancelled"


class EngineClosed(BatchwrightError, RuntimeError):
    """The engine was closed, or stopped by an error, before the request was finished."""

    code = "engine_closed"


class BatcherClosed(BatchwrightError, RuntimeError):
    """The batcher was closed before the request was finished, or before it came."""

    code = "batcher_closed"


class ServiceStopping(BatchwrightError):
    """The service is stopping and takes no new requests."""

    code = "shutting_down"

    def __init__(self, message: str = "the service is stopping: try again in a moment") -> None:
        super().__init__(message)


class InputError(BatchwrightError):
    """An input file that cannot be read at all (a bad line inside one is an error line, not this)."""

    code = "invalid_input"


class InputBroken(BatchwrightError):
    """The input changed, or turned out to be damaged, after lines of it were answered; their results are kept."""

    code = "input_broken"


class RunFailed(BatchwrightError):
    """A run that could not go on, such as on a full disk; what it finished is kept."""

    code = "run_failed"


class RowsFailed(BatchwrightError):
    """Rows of a data frame could not be answered. `frame` has the answers of the others, and `report` the figures.

    Both are None for a batch of Ray Data, whose errors travel to another process.
    """

    code = "rows_failed"

    def __init__(self, message: str, *, frame: object = None, report: object = None) -> None:
        super().__init__(message)
        self.frame = frame
        self.report = report


class BudgetExhausted(BatchwrightError):
    """The rest of a job's budget does not cover the next request."""

    code = "budget_exhausted"


class ResumeRefused(BatchwrightError):
    """An output exists, but belongs to another input or to other parameters."""

    code = "resume_refused"


class NotFound(BatchwrightError, LookupError):
    """A file, batch, webhook or key that does not exist, or belongs to another tenant.

    `param` is the parameter that names it, where the message does not make that plain.
    """

    code = "not_found"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Conflict(BatchwrightError):
    """The request contradicts the state of its object."""

    code = "conflict"


class LeaseLost(BatchwrightError):
    """A worker did not renew its lease in time; others may have taken its lines."""

    code = "lease_lost"


class StoreUnavailable(BatchwrightError):
    """The database does not answer, is damaged, or a disk is full. Nothing that was acknowledged is lost.

    The message is for the operator and may name paths and hosts; `public_message` says the same to callers without
    them.
    """

    code = "store_unavailable"

    def __init__(
        self, message: str, *, public_message: str = "the database does not answer: try again in a moment"
    ) -> None:
        super().__init__(message)
        self.public_message = public_message


class StoreMismatch(InputError):
    """A database and a data folder that do not, or may not, belong together."""

    code = "store_mismatch"


class EndpointError(BatchwrightError):
    """An endpoint elsewhere answered with an error, or not at all.

    `status` is that of its answer, None when there was none; `body` its error object, if it sent one; `retry_after` the
    seconds after which it asks to be called again, if it said so. `is_wrong_address`: whether its API is not at that
    address. `waits_alone`: whether only this call has to wait because, as far as is known, the endpoint accepts others
    meanwhile.
    """

    code = "endpoint_error"
    is_wrong_address = False
    waits_alone = False

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: dict[str, object] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.retry_after = retry_after

    @property
    def is_out_of_quota(self) -> bool:
        """Whether nothing more is computed for this key until somebody pays."""
        body = self.body or {}
        if self.status == _PAYMENT_REQUIRED or {str(body.get("code")), str(body.get("type"))} & _OUT_OF_QUOTA:
            return True
        return self.status in (400, 403, 429) and "credit balance is too low" in str(body.get("message"))

    @property
    def is_no_such_path(self) -> bool:
        """Whether the path of the call does not exist, whatever the request is about."""
        if self.status not in (404, 405):
            return False
        if not self.body or self.body.get("code") == _UNKNOWN_URL:
            return True
        message = str(self.body.get("message")).lower()
        return message in _NO_SUCH_PATH or message.startswith(_INVALID_URL)

    @property
    def is_no_such_model(self) -> bool:
        """Whether the endpoint does not have the model of the call, or not for this key."""
        if self.status not in (400, 403, 404) or not self.body:
            return False
        if {str(self.body.get("code")), str(self.body.get("type"))} & _MODEL_CODES:
            return True
        return self.status != 403 and bool(_MODEL_MISSING.search(str(self.body.get("message"))))

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later."""
        if self.status is None or self.is_out_of_quota:
            return False  # an answer that makes no sense, or a bill to be paid
        if "request too large" in str((self.body or {}).get("message")).lower():
            return False  # more than a whole window allows
        return self.status in _PASSING_STATUSES or (self.status >= 500 and self.status != 501)


class EndpointUnreachable(EndpointError):
    """An endpoint elsewhere gave no answer to a call, or only a part of one.

    `sent`: whether the call may have reached it, and may have been computed. `timed_out`: whether it took too long.
    """

    def __init__(self, message: str, *, sent: bool = True, timed_out: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.timed_out = timed_out

    @property
    def may_pass(self) -> bool:
        return True


class AnswerBroken(EndpointError):
    """An endpoint elsewhere answered a call with something that is not an answer to it, such as half of one.

    It may be tried again, but not often: each answer may have to be paid for.
    """


class EndpointDown(BatchwrightError):
    """An endpoint elsewhere is known not to answer, so the call was not sent to it.

    `retry_after`: seconds until it is checked again.
    """

    code = "endpoint_down"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def shown(value: object) -> str:
    """Return a value as messages show it: its `repr`, shortened to 100 characters.

    It takes no longer for a large value, and works where `repr` raises (an integer of more than 4300 digits does).
    """
    if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > _SHOWN_ITEMS:
        return f"({type(value).__name__} of {len(value):,})"
    try:
        text = repr(value[: _SHOWN_CHARACTERS + 1]) if isinstance(value, str) else _repr.repr(value)
    except Exception:
        return f"({type(value).__name__})"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


_repr = reprlib.Repr()
_repr.maxlevel = 1  # what lies deeper may be large
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = _SHOWN_ITEMS
_repr.maxstring = _repr.maxlong = _repr.maxother = _SHOWN_CHARACTERS
