"""`Outcomes`: ends lines for their callers, their reserved money and the account."""

from __future__ import annotations

from batchwright.inference.batches.account import BatchAccount
from batchwright.inference.batches.held import HeldLine
from batchwright.inference.batches.provider import LineResult


class Outcomes:
    """Ends lines, each once.

    A caller that leaves cancels the future of its line a moment before `BatchDesk.leave` is called. If the line's batch
    ends in this moment, the line's reservation ends here; otherwise there.
    """

    def __init__(self, account: BatchAccount) -> None:
        self._account = account

    def result(self, line: HeldLine, result: LineResult) -> None:
        """Deliver the result of a line. An error costs nothing."""
        if line.future.done():
            if line.is_noted:
                self.result_of_left(line, result)
            return
        if result.answer is not None:
            self._account.answered += 1
            line.reservation.settle(line.call.endpoint, result.answer)
        else:
            self._account.failed += 1
            line.reservation.release()
        line.future.set_result(result)

    def error(self, line: HeldLine, error: Exception) -> None:
        """End a line that was not computed with an error of its own."""
        if not line.future.done():
            self._account.failed += 1
            line.future.set_exception(error)
        elif not line.is_noted:
            return
        line.reservation.release()

    def lost(self, line: HeldLine, error: Exception) -> None:
        """End a line with an error that does not show whether it was computed."""
        if not line.future.done():
            self._account.failed += 1
            line.future.set_exception(error)
        elif not line.is_noted:
            return
        line.reservation.keep()

    def result_of_left(self, line: HeldLine, result: LineResult) -> None:
        """Count the result of a line that its caller has given up."""
        if result.answer is not None:
            line.reservation.settle(line.call.endpoint, result.answer)
        else:
            line.reservation.release()

    def live(self, line: HeldLine, *, may_be_paid: bool = False) -> None:
        """Let a line become a live request; `may_be_paid`: its batch may have computed it, and lost the result."""
        if not line.future.done():
            self._account.moved += 1
            line.future.set_result("live")
        elif not line.is_noted:
            return
        if may_be_paid:
            line.reservation.keep()
        else:
            line.reservation.release()

    def stopped(self, line: HeldLine, error: Exception) -> None:
        """End a line with an error that is not its own. The money for a line in the journal remains reserved."""
        if not line.future.done():
            if not line.is_noted:
                line.reservation.release()
            line.future.set_exception(error)
