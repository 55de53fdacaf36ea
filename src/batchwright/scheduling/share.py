"""The share guaranteed to batch traffic: an account of the tokens that it is owed."""

from __future__ import annotations

_STEPS = 16
"""Number of full steps that the account goes back at most."""


class BatchShare:
    """Account of batch sequences, which are owed `share` (0 ≤ share < 1) of all tokens computed while they want some.

    Each step adds its share of the step's tokens, and takes off the batch tokens that it carried. The account slides:
    what is owed, and what was had beyond the share, never exceeds the share of 16 full steps, so a quiet hour is not
    held against a batch. Nor is a long wait made up for in one burst: a step pays the share of two of its size at most.

    Raises ValueError for a share out of range.
    """

    def __init__(self, share: float, step_tokens: int) -> None:
        if not 0.0 <= share < 1.0:
            raise ValueError(f"batch_share={share}: must be at least 0 and less than 1, such as 0.05")
        self.share = share
        self._most = max(1.0, _STEPS * share * step_tokens)
        self._owed = 0.0

    def due(self, step_tokens: int) -> int:
        """Return the tokens of a step of `step_tokens` that batch sequences may have, whatever else waits."""
        return max(0, int(min(self._owed, max(1.0, 2.0 * self.share * step_tokens)) + 1e-9))

    def settle(self, tokens: int, batch_tokens: int, *, wanted: bool) -> None:
        """Note a step of `tokens` tokens, `batch_tokens` of them for batches; `wanted`: there are batch sequences."""
        if not self.share:
            return
        if not wanted:
            self._owed = 0.0
            return
        owed = self._owed + self.share * tokens - batch_tokens
        self._owed = min(self._most, max(-self._most, owed))
