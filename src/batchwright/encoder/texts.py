"""Tokenization of many texts at a time for an encoder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from batchwright.engine.long_texts import LongTexts
from batchwright.errors import ContextLengthExceeded, InvalidRequest, UnsupportedModel
from batchwright.padding.rectangle import Ids


class TextTokenizer:
    """Tokenizer of the model, special tokens included.

    A text of more than `max_length` tokens is refused, or with `truncate` cut to its first tokens (the special ones
    stay) and counted in `truncated`. Raises `UnsupportedModel` for a tokenizer without a fast (Rust) version.
    """

    _pairs = False
    remedy = "an Encoder made with truncate=True cuts it"
    """A further remedy for a text that is too long; code that answers requests sets one that requests offer."""

    def __init__(self, folder: Path, vocab_size: int, max_length: int, *, truncate: bool, lower_case: bool) -> None:
        from transformers import AutoTokenizer

        inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        whole = getattr(inner, "backend_tokenizer", None)
        if not isinstance(whole, Tokenizer):
            raise UnsupportedModel(f"{folder} has no fast tokenizer: save one as tokenizer.json")
        self.pad_token_id = int(inner.pad_token_id or 0)
        self.has_types = "token_type_ids" in inner.model_input_names
        """Whether the model takes the types of tokens, which distinguish the two texts of a pair."""
        self.max_length = max_length
        self._vocab_size, self._truncate, self._lower_case = vocab_size, truncate, lower_case
        self._whole = Tokenizer.from_str(whole.to_str())
        self._whole.no_padding()
        self._whole.no_truncation()
        self._long_texts = LongTexts(self._whole)
        self._cut = Tokenizer.from_str(self._whole.to_str())
        self.truncated = 0
        """Number of texts that have been cut."""
        self._cutting = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of one text, cut with `truncate`, else of any length. It is not counted.

        Raises `InvalidRequest` only for a text that has no UTF-8 form.
        """
        spelled = self._spelled(text)
        if not self._truncate:
            return list(self._whole.encode(spelled).ids)
        with self._cutting:
            self._cut.enable_truncation(self.max_length)
            return list(self._cut.encode(spelled).ids)

    def encode_many(self, prompts: Sequence[Any], most: int | None = None) -> list[Ids | InvalidRequest]:
        """Return the token ids of each prompt, a text or a list of token ids, or why it cannot be computed.

        `most`: tokens to which texts are cut; None: the tokenizer's own settings. The Rust tokenizer uses all cores and
        lets other threads run meanwhile.
        """
        most = self._most(most)
        read = [self._read(prompt, cut=most is not None) for prompt in prompts]
        encodings = iter(self._encodings([text for text in read if isinstance(text, str)], most))
        return [
            self._checked(np.array(next(encodings).ids, np.int64), each) if isinstance(each, str) else each
            for each in read
        ]

    def require_room(self, most: int | None) -> None:
        """Raise `InvalidRequest` unless texts, and pairs if the model has them, can be cut to `most` tokens."""
        least = self._whole.num_special_tokens_to_add(self._pairs) + 1 + self._pairs
        if most is not None and not least <= most <= self.max_length:
            raise InvalidRequest(
                f"truncate_prompt_tokens={most}: must be {least} to {self.max_length}, or -1 for the latter",
                param="truncate_prompt_tokens",
            )

    def _most(self, most: int | None) -> int | None:
        return self.max_length if most is None and self._truncate else most

    def _encodings(self, texts: Sequence[str | tuple[str, str]], most: int | None) -> list[Encoding]:
        """Tokenize texts and pairs; those with more than `most` tokens are cut, in a pair the longer text."""
        found = self._whole.encode_batch_fast(texts)
        if most is None:
            return found
        long = [at for at, each in enumerate(found) if len(each.ids) > most]
        if not long:
            return found
        with self._cutting:  # the length is part of the tokenizer's state
            self._cut.enable_truncation(most)
            for at, cut in zip(long, self._cut.encode_batch_fast([texts[at] for at in long]), strict=True):
                found[at] = cut
            self.truncated += len(long)
        return found

    def _read(self, prompt: Any, *, cut: bool) -> str | Ids | InvalidRequest:
        """Return the text to tokenize, or the prompt's token ids, or why it is refused."""
        if not isinstance(prompt, str):
            return self._given(prompt)
        try:
            text = self._spelled(prompt)
        except InvalidRequest as error:
            return error
        least = None if cut else self._long_texts.least_tokens(text, self.max_length)
        return text if least is None else self._too_long(f"at least {least}", text)

    def _spelled(self, text: str) -> str:
        """Return `text`, in lower case if the model wants that. Raises `InvalidRequest` if it has no UTF-8 form."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"prompt holds a lone surrogate, {text[error.start]!r}, at character {error.start}: it is no Unicode "
                'text; decode it anew, or replace it with text.encode(errors="replace").decode()',
                param="prompt",
            ) from error
        return text.lower() if self._lower_case else text

    def _given(self, prompt: Any) -> Ids | InvalidRequest:
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if (
            not isinstance(prompt, Sequence)
            or isinstance(prompt, (bytes, bytearray, memoryview))
            or not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)
        ):
            return InvalidRequest(
                f"prompt of type {type(prompt).__name__}: an encoder takes text, or a list of token ids", param="prompt"
            )
        if prompt and not (min(prompt) >= 0 and max(prompt) < self._vocab_size):
            return InvalidRequest(
                f"prompt holds a token id outside 0 to {self._vocab_size - 1}, which the model has", param="prompt"
            )
        return self._checked(np.array(prompt, np.int64), None)

    def _checked(self, ids: Ids, text: str | None) -> Ids | InvalidRequest:
        if not ids.size:
            return InvalidRequest("prompt is empty: it gives no tokens", param="prompt")
        if len(ids) <= self.max_length:
            return ids
        return self._too_long(str(len(ids)), text)

    def _too_long(self, tokens: str, text: str | None) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"prompt of {tokens} tokens is longer than max_length={self.max_length}: shorten or split it"
            + ("" if text is None else f" ({self.remedy})")
        )
