"""Several steps in one call of the model, when the host is not needed in between.

A step of few rows takes 10 ms, in which all weights go through the caches. The host then finds none of its data there,
and takes 1 ms, most of which these steps save.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from batchwright.engine.sampling import SamplingState
from batchwright.request import SamplingParams

MOST_STEPS = 16
"""Most steps in one call: the host's work for one step is then a small part of their time."""
MOST_SECONDS = 0.1
"""Seconds after which no further step is begun: a caller that acts between steps must wait for that long."""


class Interruption:
    """A signal, which any thread may set, that the host is needed after the step that is being computed."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)

    @property
    def address(self) -> int:
        """Address of 32 bits that are 0 unless the signal is set."""
        return ctypes.addressof(self._flag)

    def set(self) -> None:
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """How the steps of S sequences choose tokens, one per sequence in every step, and when they stop.

    They stop after a step in which a sequence ended, and before one that would probably end too late.
    """

    most: int
    """Most steps: at least 1."""
    seconds: float
    """Time that they may take."""
    params: Sequence[SamplingParams]
    """Of each sequence: [S]."""
    ends: Sequence[frozenset[int]]
    """Tokens that end each sequence: [S]."""
    uniforms: npt.NDArray[np.float64]
    """Random numbers of each step, for the sequences that are not greedy: [most, drawn]."""

    @classmethod
    def of(
        cls, most: int, seconds: float, states: Sequence[SamplingState], ends: Sequence[frozenset[int]]
    ) -> DecodeRun:
        """Return the run of sequences in these states, whose next tokens depend on unadjusted logits."""
        drawn = [state.uniforms(most) for state in states if not state.params.greedy]
        uniforms = np.array(drawn, np.float64).reshape(-1, most).T
        return cls(most, seconds, [state.params for state in states], ends, np.ascontiguousarray(uniforms))

    @property
    def greedy(self) -> list[bool]:
        """Whether each sequence takes the likeliest token."""
        return [each.greedy for each in self.params]

    @property
    def drawn(self) -> list[SamplingParams]:
        """Parameters of the sequences that are not greedy."""
        return [each for each in self.params if not each.greedy]

    def flat_ends(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the tokens that end each sequence, concatenated, and where those of each begin: [S + 1]."""
        starts = np.fromiter(accumulate(map(len, self.ends), initial=0), np.int32)
        return np.array([token for each in self.ends for token in each], np.int64), starts


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """Result of one step of a `DecodeRun`."""

    tokens: list[int | None]
    """Token of each sequence, None if its logits were not finite."""
    likeliest: int
    """Number of rows whose likeliest token was found without their logits."""
    products: float
    """Seconds in matrix products, a mean over threads, as are those in attention."""
    attention: float
    model: float
    """Seconds in the model."""
    seconds: float
    """Seconds until all tokens were chosen."""
