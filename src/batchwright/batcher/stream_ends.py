"""What an entry without text means in the streams of a model: nothing new, or the end of its sequence.

As documented, `""` is "nothing new" and `None` ends a sequence. Some models have it the other way round, and no text of
theirs may be lost. Text that follows an entry shows that it was no end. Until one of the two has been seen, a sequence
that got `None` is *held*: it gives up its slot, and is answered when it cannot go on any more. That is when it has had
both kinds of entries since its last text, when its stream has ended, or after `_PATIENCE` lists without text. Once some
sequences have ended so, and none went on, `None` is taken for the end at once.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from dataclasses import dataclass

_PATIENCE = 8
"""Lists in which a sequence has no text after its first None: then it has ended."""
_CONFIRMED = 2
"""Sequences that have to end after a None before it is taken for the end at once."""

_log = logging.getLogger("batchwright.batcher")


class Meaning(enum.Enum):
    """What an entry says of its sequence."""

    TOKEN = enum.auto()
    """A token, or whatever else the model gave for one."""
    NOTHING_NEW = enum.auto()
    HELD = enum.auto()
    """Probably the end."""
    END = enum.auto()


@dataclass(slots=True)
class Silence:
    """Entries without text that a sequence had since its last text."""

    nones: int = 0
    empties: int = 0
    has_ended: bool = False


class StreamEnds:
    """What has been learned about the entries without text of one model."""

    def __init__(self) -> None:
        self.none_ends: bool | None = None
        """Whether `None` ends a sequence and `""` does not, or the other way round; None: not known yet."""
        self._confirmations = 0

    def meaning(self, entry: object, silence: Silence) -> Meaning:
        """Return what `entry` says of the sequence with this `silence`, and count it there."""
        if entry is not None and entry != "":
            return self._token(silence)
        if entry is None:
            silence.nones += 1
        else:
            silence.empties += 1
        if not self._is_end(entry, silence):
            return Meaning.HELD if entry is None and self.none_ends is None else Meaning.NOTHING_NEW
        silence.has_ended = True
        return Meaning.END

    def stream_ended(self, silences: Iterable[Silence]) -> None:
        """Learn from the silences in which the sequences of a stream were when it ended."""
        for silence in silences:
            # In one list only, None may stand for nothing new just as well.
            if silence.nones > 1 and not silence.has_ended:
                self._confirm()

    def _token(self, silence: Silence) -> Meaning:
        if silence.has_ended:
            if silence.nones and not silence.empties and self.none_ends:
                self.none_ends = False
                _log.error('the model gave text after a None, which is lost: give "" where there is nothing new')
        elif silence.nones and not silence.empties:
            self.none_ends = False
        elif silence.empties and not silence.nones:
            self.none_ends = True
        silence.nones = silence.empties = 0
        return Meaning.TOKEN

    def _is_end(self, entry: object, silence: Silence) -> bool:
        if self.none_ends is not None:
            return (entry is None) == self.none_ends
        if silence.nones > _PATIENCE:
            self._confirm()
            return True
        return silence.nones > 0 and silence.empties > 0

    def _confirm(self) -> None:
        self._confirmations += 1
        if self.none_ends is None and self._confirmations >= _CONFIRMED:
            self.none_ends = True
