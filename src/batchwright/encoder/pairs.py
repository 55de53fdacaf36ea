"""Tokenization of single texts and pairs of texts for a model with token types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tokenizers import Encoding

from batchwright.encoder.texts import TextTokenizer
from batchwright.errors import InvalidRequest
from batchwright.padding.rectangle import Ids

Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TypedTokens:
    """Tokens of a text or a pair, including special ones, with the type of each, which marks its part of a pair."""

    ids: Ids
    types: Ids

    def __len__(self) -> int:
        return len(self.ids)


class PairTokenizer(TextTokenizer):
    """Tokenizer of a model for single texts and pairs, which are joined by its own template.

    An input of more than `max_length` tokens is refused or, with `truncate`, cut: in a pair, the longer text is cut
    token by token.
    """

    _pairs = True
    remedy = "a Classifier made with truncate=True cuts it"

    def encode_inputs(self, inputs: Sequence[Any], most: int | None = None) -> list[TypedTokens | InvalidRequest]:
        """Return the tokens of each input, a text, a pair or a list of token ids, or why it cannot be computed.

        `most`: tokens to which texts and pairs are cut; None: the tokenizer's own settings.
        """
        most = self._most(most)
        read = [self._readable(each, cut=most is not None) for each in inputs]
        texts = [each for each in read if isinstance(each, (str, tuple))]
        encodings = iter(self._encodings(texts, most))
        return [self._typed(next(encodings)) if isinstance(each, (str, tuple)) else each for each in read]

    def _readable(self, given: Any, *, cut: bool) -> str | Pair | TypedTokens | InvalidRequest:
        if isinstance(given, TypedTokens):
            return given
        if not isinstance(given, (str, tuple)):
            ids = self._given(given)
            return ids if isinstance(ids, InvalidRequest) else TypedTokens(ids, np.zeros(len(ids), np.int64))
        parts = (given,) if isinstance(given, str) else given
        if not 0 < len(parts) <= 2 or not all(isinstance(part, str) for part in parts):
            return InvalidRequest("prompt must be a text, a pair of texts, or a list of token ids", param="prompt")
        try:
            spelled = [self._spelled(part) for part in parts]
        except InvalidRequest as error:
            return error
        if not cut:
            for text in spelled:
                least = self._long_texts.least_tokens(text, self.max_length)
                if least is not None:
                    return self._too_long(f"at least {least}", text)
        return spelled[0] if len(spelled) == 1 else (spelled[0], spelled[1])

    def _typed(self, encoding: Encoding) -> TypedTokens | InvalidRequest:
        ids = np.array(encoding.ids, np.int64)
        if not ids.size:
            return InvalidRequest("prompt is empty: it gives no tokens", param="prompt")
        if len(ids) > self.max_length:
            return self._too_long(str(len(ids)), "")
        types = np.array(encoding.type_ids, np.int64) if self.has_types else np.zeros(len(ids), np.int64)
        return TypedTokens(ids, types)
