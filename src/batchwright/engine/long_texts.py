"""Detection of texts with more tokens than a model takes, without tokenizing all of it: megabytes take seconds.

There are two ways, and neither refuses a text that would fit. If each token stands for a bounded number of characters,
the length of the text bounds its number of tokens from below. Otherwise the text is tokenized in pieces, cut where the
tokenizer cuts it in any case, until they have too many tokens.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

_PIECE_PER_TOKEN = 8
_LEAST_PIECE = 4096
"""Fewest characters of a piece."""
_SLACK = 2
"""Tokens by which a cut may be wrong. None is known to be wrong; the slack costs nothing, as a piece has many more."""

_COMPOSED = 4
"""Most characters that Unicode's canonical composition joins into one."""
_NOT_SHORTER = {"NFC": _COMPOSED, "NFKC": _COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_LOCAL = frozenset({
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled", "Nmt",
})  # fmt: skip
"""Normalizers that never change a space between two letters, or depend on text across it."""
_KEEPS_ALL = frozenset({"ByteLevel", "Split", "Digits", "Metaspace"})
_CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df"
_BETWEEN_WORDS = r"(?<=[A-Za-z]) (?=[A-Za-z])"


class LongTexts:
    """Lower bounds of the numbers of tokens that a tokenizer gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Prepare bounds for `tokenizer`, which must neither truncate nor pad."""
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.to_str())
        self._most_characters = _most_characters(tokenizer, spec)
        letters = _letters() if _is_byte_level(spec) else {}
        self._dropped = [chr(b) for b, letter in letters.items() if b < 0x80 and letter not in spec["model"]["vocab"]]
        """ASCII characters that a byte-level tokenizer drops, since it has no token for them."""
        self._cut = _cut(tokenizer, spec)

    def least_tokens(self, text: str, most: int) -> int | None:
        """Return a lower bound of the tokens of `text`, special ones excluded, if it is above `most`; else None."""
        if self._most_characters is not None and len(text) > most * self._most_characters:
            kept = len(text) - sum(map(text.count, self._dropped))
            least = -(-kept // self._most_characters)
            return least if least > most else None
        size = max(_LEAST_PIECE, most * _PIECE_PER_TOKEN)
        if self._most_characters is not None or self._cut is None or len(text) <= 2 * size:
            return None
        tokens = 0
        for cuts, piece in enumerate(_pieces(text, size, self._cut), 1):
            if len(piece) > len(text) / 2:
                return None  # with hardly any place to cut, the whole text would be tokenized twice
            tokens += len(self._tokenizer.encode(piece, add_special_tokens=False).ids)
            if tokens - _SLACK * cuts > most:
                return tokens - _SLACK * cuts
        return None


def _pieces(text: str, size: int, cut: re.Pattern[str]) -> Iterator[str]:
    start = 0
    while start < len(text):
        found = cut.search(text, start + size)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def _parts(spec: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer, a pre-tokenizer or a decoder."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [part for each in spec[inner] for part in _parts(each, inner)]
    return [spec]


def _most_characters(tokenizer: Tokenizer, spec: Mapping[str, Any]) -> int | None:
    """Return the most characters of a text that a token can stand for; None if that is not certain.

    It is known for tokenizers that drop nothing but a few ASCII characters: byte-level ones, whose tokens are spelled
    with a character for each byte, and those that fall back to bytes for characters without a token.
    """
    model = spec["model"]
    shrinks = 1
    for part in _parts(spec["normalizer"], "normalizers"):
        one_for_one = part["type"] == "Replace" and part["pattern"].get("String") == " " and part["content"] == "▁"
        if part["type"] not in _NOT_SHORTER and not one_for_one:
            return None
        shrinks *= 1 if one_for_one else _NOT_SHORTER[part["type"]]
    for part in _parts(spec["pre_tokenizer"], "pretokenizers"):
        if part["type"] not in _KEEPS_ALL or part.get("behavior") == "Removed":
            return None
    if any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"]):
        return None
    if model["type"] != "BPE":
        return None
    if _is_byte_level(spec):  # no character beyond ASCII is dropped: the last byte of each is one of these
        needed = [letter for byte, letter in _letters().items() if 0x80 <= byte < 0xC0]
    elif model.get("byte_fallback"):
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(token in model["vocab"] for token in needed):
        return None
    # An added token may be found before the text is normalized or after, and may be as long as any other.
    return shrinks * max(map(len, tokenizer.get_vocab(with_added_tokens=True)))


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    """Return whether tokens are spelled with a character for each byte."""
    return any(part["type"] == "ByteLevel" for part in _parts(spec["decoder"], "decoders"))


def _letters() -> dict[int, str]:
    """Return the character for each byte in the tokens of byte-level tokenizers, as in GPT-2."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {byte: chr(byte) for byte in itself} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def _cut(tokenizer: Tokenizer, spec: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern of places where a cut changes no tokens of any text; None if none is certain."""
    added = [token["content"] for token in spec["added_tokens"]]
    if any(token["rstrip"] for token in spec["added_tokens"]) or any(re.search(r"\s", each) for each in added):
        return None
    normalizers = _parts(spec["normalizer"], "normalizers")
    if not all(part["type"] in _LOCAL or _collapses_spaces(part) for part in normalizers):
        return None
    splits = [part["type"] for part in _parts(spec["pre_tokenizer"], "pretokenizers")]
    if splits == ["BertPreTokenizer"]:
        return _between_single_characters(normalizers, added)
    if tokenizer.pre_tokenizer is None or not _splits_words(tokenizer):
        return None
    return re.compile(_BETWEEN_WORDS)


def _between_single_characters(normalizers: list[Mapping[str, Any]], added: list[str]) -> re.Pattern[str]:
    """Return the places to cut texts for BERT: before whitespace, punctuation and ideographs, but in no added token."""
    within = "".join(token[1:] for token in added)
    free = "".join(each for each in string.punctuation if each not in within)
    kept = [re.escape(each) for each in string.punctuation if each in within and each * 2 not in "".join(added)]
    doubled = [f"(?<={each}){each}" for each in kept]
    ideographs = ""
    if [part["type"] for part in normalizers] == ["BertNormalizer"] and normalizers[0]["handle_chinese_chars"]:
        ideographs = _CHINESE
    return re.compile("|".join([rf"[ \t\n{re.escape(free)}{ideographs}]", *doubled]))


def _collapses_spaces(part: Mapping[str, Any]) -> bool:
    return part["type"] == "Replace" and part["pattern"].get("Regex") in (" {2,}", r"\s{2,}")


def _splits_words(tokenizer: Tokenizer) -> bool:
    """Return whether no word was put into one piece with the space before the next word in a few trials."""
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    trials = (("ab", "cd"), ("A", "b"), ("xYz", "Q"))
    return all(len(left) in [end for _, (_, end) in split(f"{left} {right}")] for left, right in trials)
