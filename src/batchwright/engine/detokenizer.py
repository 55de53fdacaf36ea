"""Text of a growing list of tokens, piece by piece, without ever half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character, so also the most tokens that one is spread over."""


class IncrementalDetokenizer:
    """Feed it tokens, get the text that has become certain.

    A tokenizer decodes the same token differently after others (blanks, joined bytes), so the new text is the
    difference of two decodings that start at the same earlier token. Text that ends in an incomplete character is
    held back until the character is complete; bytes that can no longer become one are let go as U+FFFD.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0
        """Decoding starts here, so that the first undecided token is decoded in its context."""
        self._decided = 0
        """Text of the tokens before this has been given out,"""
        self._open = False
        """but for a last character that they only begin."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text made certain by these tokens, which follow those given before."""
        self._tokens.extend(tokens)
        known = self._decode(self._tokens[self._context : self._decided])
        given = len(known) - self._open
        text = self._decode(self._tokens[self._context :])
        end, is_open = len(self._tokens), False
        if text.endswith(_INCOMPLETE):
            if end - self._decided <= 2 * _LONGEST_CHARACTER:
                return ""
            end, text, is_open = self._settle(text)
        self._context, self._decided, self._open = self._decided, end, is_open
        return text[given:]

    def _settle(self, text: str) -> tuple[int, str, bool]:
        """Where to cut, the text up to there, and whether its last token begins a character that is not in it.

        The cut is before the tokens that are no character yet; or, when every token ends within a character, within
        the last one.
        """
        for held in range(1, _LONGEST_CHARACTER):
            end = len(self._tokens) - held
            shorter = self._decode(self._tokens[self._context : end])
            if not shorter.endswith(_INCOMPLETE):
                return end, shorter, False
        whole = text[: -len(_INCOMPLETE)]
        if whole.endswith(_INCOMPLETE):  # bytes that are no character, not the beginning of one
            return len(self._tokens), text, False
        return len(self._tokens), whole, True
