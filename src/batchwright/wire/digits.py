"""Float32 values as Python floats that are written with few digits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_POWERS = np.array([float(f"1e{power}") for power in range(64)])
_FIRST, _LAST = 6, 10
"""Digits to try. A decimal of 6 survives the way into a float32 and back; 9 give every float32 back. One more, since
the place of the first digit is taken from a logarithm, which may be wrong by one beside a power of ten."""


def short_floats(values: npt.NDArray[np.float32]) -> list[float]:
    """The values [n], each as the float that has the fewest digits of those that become the same float32 again.

    Written as what it is exactly, a float32 takes up to 17 digits. (Below 1e-13 and above 1e22 there may be as many.)
    """
    exact = values.astype(np.float64)
    short = exact.copy()
    left = np.flatnonzero(np.isfinite(exact) & (exact != 0.0))
    first = np.floor(np.log10(np.abs(exact[left]))).astype(np.int64)
    with np.errstate(over="ignore"):
        for digits in range(_FIRST, _LAST + 1):
            found = _rounded(exact[left], digits - 1 - first)
            same = found.astype(np.float32) == values[left]
            short[left[same]] = found[same]
            left, first = left[~same], first[~same]
    result: list[float] = short.tolist()
    return result


def _rounded(values: npt.NDArray[np.float64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """To `places` decimals, below zero to tens, hundreds, ...: the floats nearest to those decimals.

    A whole number and a power of ten up to 1e22 are exact, so their quotient and their product are rounded once.
    """
    powers = _POWERS[np.abs(places)]
    found: npt.NDArray[np.float64] = np.where(
        places >= 0, np.rint(values * powers) / powers, np.rint(values / powers) * powers
    )
    return found
