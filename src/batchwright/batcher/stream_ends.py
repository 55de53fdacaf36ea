"""What an entry without text means in the streams of a model: nothing new, or the end of its sequence.

As documented, `""` is "nothing new" and `None` ends a sequence. Some models use them the other way round, and none of
their text may be lost. Text that follows an entry proves that the entry was not the end. Until then, a sequence that
had text and then `None` is *held*: it gives up its slot, and is answered when it has had both kinds of entries since
its last text, or when its stream has ended. Once sequences of two streams have ended like this, and none continued,
`None` is taken for the end of a sequence that had text. Before a sequence has text, it is the end only if that is
proven: it may stand for a prompt that is still being read.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable
from dataclasses import dataclass

_CONFIRMED = 2
"""Streams in which nothing may follow a None before None is taken for the end immediately."""

_log = logging.getLogger("batchwright.batcher")


class Meaning(enum.Enum):
    """What an entry means for its sequence."""

    TOKEN = enum.auto()
    """A token, or whatever else the model returned for one."""
    NOTHING_NEW = enum.auto()
    HELD = enum.auto()
    """Probably the end."""
    END = enum.auto()


@dataclass(slots=True)
class Silence:
    """The entries of a sequence since its last text."""

    nones: int = 0
    empties: int = 0
    has_text: bool = False
    """Whether it ever had text."""
    has_ended: bool = False


class StreamEnds:
    """What has been learned about one model's entries without text."""

    def __init__(self) -> None:
        self.none_ends: bool | None = None
        """Whether `None` ends a sequence and `""` does not, or the other way round; None: not known yet."""
        self._is_proven = False
        self._confirmations = 0

    def meaning(self, entry: object, silence: Silence) -> Meaning:
        """Return what `entry` means for the sequence with this `silence`, and count it there."""
        if entry is not None and entry != "":
            return self._token(silence)
        if silence.has_ended:
            return Meaning.END
        if entry is None:
            silence.nones += 1
        else:
            silence.empties += 1
        if self._is_end(entry, silence):
            silence.has_ended = True
            return Meaning.END
        is_held = entry is None and self.none_ends is None and silence.has_text
        return Meaning.HELD if is_held else Meaning.NOTHING_NEW

    def stream_ended(self, silences: Iterable[Silence]) -> None:
        """Learn from the silences in which the sequences of a stream were when it ended."""
        # If None came in only one list, it may equally mean nothing new.
        if any(each.has_text and each.nones > 1 and not each.empties for each in silences):
            self._confirmations += 1
            if self.none_ends is None and self._confirmations >= _CONFIRMED:
                self.none_ends = True

    def _token(self, silence: Silence) -> Meaning:
        if silence.nones and not silence.empties:
            if silence.has_ended:
                _log.error('the model gave text after a None, which is lost: give "" where there is nothing new')
            self._prove(none_ends=False)
        elif silence.empties and not silence.nones and not silence.has_ended:
            self._prove(none_ends=True)
        silence.nones = silence.empties = 0
        silence.has_text = True
        return Meaning.TOKEN

    def _prove(self, *, none_ends: bool) -> None:
        if not self._is_proven:
            self.none_ends, self._is_proven = none_ends, True

    def _is_end(self, entry: object, silence: Silence) -> bool:
        if self.none_ends is None:
            return silence.nones > 0 and silence.empties > 0
        return (entry is None) == self.none_ends and (self._is_proven or silence.has_text)
