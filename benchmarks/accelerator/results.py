"""The measurements of the sections. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from batchwright.engine_config import QuantizationName

Section: TypeAlias = Literal["hardware", "decode", "prefix", "mixed", "fp8", "generate_batch", "tests"]


@dataclass(frozen=True, slots=True)
class Host:
    device: str
    software: str


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth of a copy on the device."""

    bytes_per_second: float
    """Bytes read plus bytes written."""


@dataclass(frozen=True, slots=True)
class Products:
    """All matrix products of one step of `rows` tokens."""

    rows: int
    layers: float
    head: float
    """Seconds of the output layer for as many rows."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Steady decoding of a number of sequences."""

    sequences: int
    context: float
    """Mean tokens of a sequence, prompt and output so far, in the steps that counted."""
    step: float
    """Seconds from one token of a sequence to the next."""
    quantization: QuantizationName | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Steady decoding under the profiler."""

    sequences: int
    kernels: float
    """Seconds per step in which any kernel or copy ran."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Steady decoding behind a common prefix of a number of tokens, 0 for none."""

    prefix: int
    step: float


@dataclass(frozen=True, slots=True)
class Mixed:
    """The job of mixed lengths, from the token ids to the last token."""

    system: Literal["batchwright", "transformers"]
    settings: str
    seconds: float
    ended: bool
    """False: it was stopped after `seconds`."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A run of pytest. `ended` is False if its time ran out first."""

    passed: int
    failed: tuple[str, ...]
    """Names of failed tests, including those with errors."""
    skipped: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A part of a section that cannot be measured here."""

    what: str
    reason: str


Result: TypeAlias = Host | Bandwidth | Products | Decode | Busy | Prefix | Mixed | Suite | Unavailable
