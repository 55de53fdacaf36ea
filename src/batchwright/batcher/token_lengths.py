"""Lengths of prompts and outputs in tokens: by the model's tokenizer, or estimated if it has none.

The estimate is one token per four characters, as is usual for English text; it is logged once per batcher.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from batchwright.errors import InvalidRequest
from batchwright.request import Usage

_log = logging.getLogger("batchwright.batcher")


class Measure:
    """Lengths for the policy, and token counts for the answers.

    The length of a prompt that is not text is its `len` (1 if it has none). `length` replaces this and the tokenizer as
    the measure of prompts.
    """

    def __init__(self, tokenizer: Any, length: Callable[[Any], int] | None = None) -> None:
        encode = getattr(tokenizer, "encode", None)
        # An `encode` that has to be awaited, such as a mock's, is not used.
        self._encode: Callable[..., Sized] | None = None if inspect.iscoroutinefunction(encode) else encode
        self._bare: dict[str, bool] = {}
        """Arguments for encoding an output, which has no beginning-of-text token."""
        if self._encode is not None and _accepts(self._encode, "add_special_tokens"):
            self._bare = {"add_special_tokens": False}
        self._length = length
        self._estimates_logged = False

    def length(self, prompt: Any) -> int:
        """Return the length, at least 0. Raises `InvalidRequest` for a prompt that cannot be measured."""
        measure = self._length
        try:
            if measure is not None:
                length = measure(prompt)
                return length if type(length) is int and length > 0 else max(0, int(length))
            if self._encode is not None:
                return _size(prompt, self._tokens)
        except InvalidRequest:
            raise
        except Exception as error:
            by = "length=" if self._length is not None else "the model's tokenizer"
            raise InvalidRequest(f"prompt: its length cannot be measured by {by}: {error}", param="prompt") from error
        if not self._estimates_logged:
            self._log_estimates(prompt)
        return _size(prompt, estimated_tokens)

    def usage(self, prompt: Any, length: int, generated: int) -> Usage:
        """Return the token counts of a request; `length` is the measured length of its prompt."""
        is_text = isinstance(prompt, str)
        is_measured = is_text and self._length is None
        # Equivalent to calling the class, whose initializer sets each field by a call.
        usage = object.__new__(Usage)
        values = {
            "prompt_tokens": length if is_measured else self._prompt_tokens(prompt),
            "completion_tokens": generated,
            "cached_tokens": 0,
            "is_estimate": self._encode is None and (is_text or generated > 0),
        }
        object.__setattr__(usage, "__dict__", values)
        return usage

    def output_tokens(self, output: Any) -> int:
        """Return the number of tokens; 0 for an output that is not text."""
        return self._counted(output, **self._bare) if isinstance(output, str) else 0

    def _prompt_tokens(self, prompt: Any) -> int:
        """Return the number of tokens of a text, or of token ids; 0 if unknown."""
        if isinstance(prompt, str):
            return self._counted(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        return 0

    def _log_estimates(self, prompt: Any) -> None:
        if isinstance(prompt, str):
            self._estimates_logged = True
            _log.info(
                "the model has no tokenizer: lengths are estimated at four characters a token; give the model an "
                "attribute `tokenizer`, or the batcher length="
            )

    def _counted(self, text: str, **options: bool) -> int:
        """Return the number of tokens; 0 if the tokenizer fails: that does not discard an answer."""
        if self._encode is None:
            return estimated_tokens(text)
        try:
            return len(self._encode(text, **options))
        except Exception:
            _log.exception("the tokenizer failed on a text of %d characters; its tokens are not counted", len(text))
            return 0

    def _tokens(self, text: str) -> int:
        return len(self._encode(text)) if self._encode is not None else 0


def estimated_tokens(text: str) -> int:
    """Return the estimated number of tokens of a text: one per four characters, rounded up."""
    return (len(text) + 3) // 4


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
