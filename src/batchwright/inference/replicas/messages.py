"""Messages between a process and the replicas that it started, in msgpack; over a socket, each after its length."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from batchwright import errors
from batchwright.errors import BatchwrightError
from batchwright.inference.inference import Call, WorkUnderWay
from batchwright.inference.replicas.replica import ReplicaFacts
from batchwright.request import Flow, SamplingParams, Traffic, portable

if TYPE_CHECKING:
    from batchwright.engine.engine_stats import EngineStats

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class ReplicaSpec(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a replica loads, and where it computes: the first message to it."""

    model: str | None
    embedding_model: str | None
    classifiers: tuple[str, ...] = ()
    config: dict[str, Any]
    """Options of the engine that differ from their defaults."""
    cpus: tuple[int, ...] | None = None
    """Processors that it uses; None: any."""
    threads: int | None = None
    count: int = 1
    """Number of replicas that share the memory of this machine."""
    weights: int | None = None
    """Descriptor of memory in which replicas share packed weights; None: each holds its own."""
    stepped: bool = False
    """Whether its engine computes on its event loop, which costs less but cannot stream."""
    beat: float = 1.0
    """Seconds between two signs of life."""


class Ask(msgspec.Struct, tag=True):
    """A call."""

    id: int
    endpoint: str
    body: bytes
    """JSON, which can represent numbers and texts that msgpack cannot."""
    request_id: str
    traffic: Traffic
    timeout: float | None
    flow: Flow | None
    params: SamplingParams | None
    given: dict[str, Any] | None
    stream: bool

    @classmethod
    def of(cls, number: int, call: Call, *, stream: bool) -> Ask:
        """Return the message for a call."""
        defaults = call.defaults
        params = portable(defaults) if isinstance(defaults, SamplingParams) else None
        given = None if defaults is None or params is not None else dict(cast("Mapping[str, Any]", defaults))
        body = _encoded_body(call.body)
        return cls(
            number, call.endpoint, body, call.request_id, call.traffic, call.timeout, call.flow, params, given, stream
        )

    def call(self) -> Call:
        """Return the call."""
        body = json.loads(self.body)
        defaults = self.given if self.params is None else self.params
        return Call(self.endpoint, body, self.request_id, self.traffic, self.timeout, flow=self.flow, defaults=defaults)


class Cancel(msgspec.Struct, tag=True):
    """A call whose answer is not wanted any more."""

    id: int


class Look(msgspec.Struct, tag=True):
    """A query for the work of a job."""

    id: int
    prefix: str


class Close(msgspec.Struct, tag=True):
    """An order to end."""


class Loading(msgspec.Struct, tag=True):
    """A step of loading that may take long."""

    text: str


class Ready(msgspec.Struct, tag=True):
    """The model is loaded."""

    facts: ReplicaFacts


class Refused(msgspec.Struct, tag=True):
    """The model cannot be loaded."""

    error: bytes


class Answered(msgspec.Struct, tag=True):
    """The answer to a call."""

    id: int
    body: dict[str, Any]


class Chunk(msgspec.Struct, tag=True):
    """A part of the answer to a call, which may be the last; None: there are no more."""

    id: int
    body: dict[str, Any] | None


class Raised(msgspec.Struct, tag=True):
    """The error of a call."""

    id: int
    error: bytes


class Found(msgspec.Struct, tag=True):
    """The answer to `Look`."""

    id: int
    work: WorkUnderWay | None


class Beat(msgspec.Struct, tag=True):
    """A sign of life, with the figures of the engine."""

    figures: bytes


class Broken(msgspec.Struct, tag=True):
    """The last message of a replica that cannot go on."""

    reason: str


ToReplica: TypeAlias = ReplicaSpec | Ask | Cancel | Look | Close
FromReplica: TypeAlias = Loading | Ready | Refused | Answered | Chunk | Raised | Found | Beat | Broken

encoded = msgspec.msgpack.Encoder().encode
decode_for_replica = msgspec.msgpack.Decoder(ToReplica).decode
decode_from_replica = msgspec.msgpack.Decoder(FromReplica).decode


def frame(message: ToReplica | FromReplica) -> bytes:
    """Return the bytes of a message."""
    content = encoded(message)
    return _LENGTH.pack(len(content)) + content


def length_of(header: bytes) -> int:
    """Return the number of bytes that follow a header."""
    return int(_LENGTH.unpack(header)[0])


def encoded_error(error: BaseException) -> bytes:
    """Return the bytes of an error. One that is not batchwright's own keeps only its message."""
    known = isinstance(error, BatchwrightError) and hasattr(errors, type(error).__name__)
    name, attributes = (type(error).__name__, vars(error)) if known else ("", {})
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return json.dumps([name, message, attributes], default=str).encode()


def decoded_error(content: bytes) -> Exception:
    """Return the error in the bytes that `encoded_error` made."""
    name, message, attributes = json.loads(content)
    if not name:
        return RuntimeError(message)
    kind: type[BatchwrightError] = getattr(errors, name)
    error = kind.__new__(kind)
    error.args = (message,)
    vars(error).update(attributes)
    return error


def encoded_figures(stats: EngineStats | None) -> bytes:
    """Return the bytes of statistics, which only the process that started this one reads."""
    return pickle.dumps(stats)


def decoded_figures(content: bytes) -> EngineStats | None:
    """Return the statistics of a replica that this process started."""
    figures: EngineStats | None = pickle.loads(content)
    return figures


def _encoded_body(body: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (OverflowError, UnicodeEncodeError, TypeError):
        return json.dumps(body).encode()


def merged_work(found: Sequence[WorkUnderWay]) -> WorkUnderWay | None:
    """Return the work of a job that several replicas compute side by side; None if none does."""
    if not found:
        return None
    return WorkUnderWay(
        steps=max(each.steps for each in found),
        step_tokens=sum(each.step_tokens for each in found),
        running=[answer for each in found for answer in each.running],
        prompt_tokens=sum(each.prompt_tokens for each in found),
        prompt_tokens_left=sum(each.prompt_tokens_left for each in found),
        places=sum(each.places for each in found),
        longest=max(each.longest for each in found),
    )
