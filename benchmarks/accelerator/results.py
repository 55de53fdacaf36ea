"""What the sections measure, as it was measured. Times are seconds."""

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
    """Of a copy on the device."""

    bytes_per_second: float
    """Read and written ones both counted."""


@dataclass(frozen=True, slots=True)
class Products:
    """All matrix products of one step of `rows` tokens."""

    rows: int
    layers: float
    head: float
    """The output layer, for as many rows."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Steady decoding of so many sequences."""

    sequences: int
    context: float
    """Mean tokens of a sequence, prompt and output so far, in the steps that counted."""
    step: float
    """From a token of a sequence to its next."""
    quantization: QuantizationName | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """Steady decoding under the profiler."""

    sequences: int
    kernels: float
    """A step: time in which any kernel or copy ran."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Steady decoding behind a common prefix of so many tokens, 0 for none."""

    prefix: int
    step: float


@dataclass(frozen=True, slots=True)
class Mixed:
    """The job of unlike lengths, from the token ids to the last token."""

    system: Literal["batchwright", "transformers"]
    settings: str
    seconds: float
    ended: bool
    """False: it was stopped after `seconds`."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A run of pytest. `ended` is false when its time was over first."""

    passed: int
    failed: tuple[str, ...]
    """Their names, those of errors included."""
    skipped: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A piece of a section that cannot be measured here."""

    what: str
    reason: str


Result: TypeAlias = Host | Bandwidth | Products | Decode | Busy | Prefix | Mixed | Suite | Unavailable
