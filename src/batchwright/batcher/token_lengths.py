"""Lengths of prompts and outputs: in tokens where the model has a tokenizer, never by splitting on blanks."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from batchwright.errors import InvalidRequest

_log = logging.getLogger("batchwright.batcher")


class Measure:
    """Lengths for the policy, and token counts for the answers.

    Without a tokenizer a text is as long as its characters and everything else as `len` says (1 where it says nothing):
    good for comparing lengths, and no count of tokens. `length` replaces both measures.
    """

    def __init__(self, tokenizer: Any, length: Callable[[Any], int] | None = None) -> None:
        self._encode: Callable[..., Sized] | None = getattr(tokenizer, "encode", None)
        self._bare: dict[str, bool] = {}
        """Arguments for encoding an output, which has no beginning-of-text token."""
        if self._encode is not None and _accepts(self._encode, "add_special_tokens"):
            self._bare = {"add_special_tokens": False}
        self._length = length

    def length(self, prompt: Any) -> int:
        """Return the length, at least 0. Raises `InvalidRequest` for a prompt that cannot be measured."""
        if self._length is None and self._encode is None:
            return _size(prompt, len)
        try:
            if self._length is not None:
                length = self._length(prompt)
                return length if isinstance(length, int) and length > 0 else max(0, int(length))
            return _size(prompt, self._tokens)
        except Exception as error:
            raise InvalidRequest(f"prompt: its length cannot be measured: {error}", param="prompt") from error

    def prompt_tokens(self, prompt: Any, length: int) -> int:
        """Return the number of tokens by the tokenizer, or of token ids; 0: unknown. `length` is what was measured."""
        if isinstance(prompt, str):
            return self._counted(prompt) if self._length is not None else length * (self._encode is not None)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        return 0

    def output_tokens(self, output: Any) -> int:
        """Return the number of tokens by the tokenizer; 0 without one, or for an output that is no text."""
        return self._counted(output, **self._bare) if isinstance(output, str) else 0

    def _counted(self, text: str, **options: bool) -> int:
        """Return the number of tokens; 0 too where the tokenizer fails: an answer is not thrown away for that."""
        try:
            return len(self._encode(text, **options)) if self._encode is not None else 0
        except Exception:
            _log.exception("the tokenizer failed on a text of %d characters; its tokens are not counted", len(text))
            return 0

    def _tokens(self, text: str) -> int:
        return len(self._encode(text)) if self._encode is not None else 0


def _size(prompt: Any, of_text: Callable[[str], int]) -> int:
    if isinstance(prompt, str):
        return of_text(prompt)
    if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return sum(_size(message.get("content", ""), of_text) for message in prompt if isinstance(message, Mapping))
    return len(prompt) if isinstance(prompt, Sized) else 1


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
