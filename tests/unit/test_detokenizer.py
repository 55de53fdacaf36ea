"""Incremental detokenization, with a byte-level tokenizer whose tokens are arbitrary pieces of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchwright.engine.tokenizer import IncrementalDetokenizer

_UNDECIDED = 8
"""Tokens that are held at most for a character that never comes."""


class Pieces:
    """Token i is `pieces[i]`; decoding replaces what is no character, as byte-level tokenizers do."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.decoded = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


class ByteFallback(Pieces):
    """A run of bytes that is not wholly UTF-8 becomes a U+FFFD for each byte, as with sentencepiece models."""

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded += len(tokens)
        data = b"".join(self.pieces[token] for token in tokens)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)


def pushed(tokenizer: Pieces) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    return [detokenizer.push([token]) for token in range(len(tokenizer.pieces))]


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


characters = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")
sizes = st.lists(st.integers(1, 5), max_size=80)


@given(st.text(characters | st.sampled_from("🦊🌲日本語é"), max_size=80), sizes)
@example("日本語の文章です日本語の文章です", [2] + [3] * 15)
def test_pieces_of_utf8_come_out_whole(text: str, cuts: list[int]) -> None:
    data = text.encode()
    parts = pushed(Pieces(cut(data, cuts)))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@given(st.text(characters, max_size=40), st.integers(1, 3), sizes)
def test_half_a_character_at_the_end_is_never_given(text: str, missing: int, cuts: list[int]) -> None:
    data = text.encode() + "🦊".encode()[:-missing]
    given_out = "".join(pushed(Pieces(cut(data, cuts))))
    assert text.startswith(given_out)
    assert "\ufffd" not in given_out


@given(st.text(characters | st.sampled_from("🦊日é"), max_size=30))
def test_bytes_one_by_one_with_byte_fallback(text: str) -> None:
    data = text.encode()
    assert "".join(pushed(ByteFallback([data[i : i + 1] for i in range(len(data))]))) == text


@given(st.binary(max_size=60), sizes, st.lists(st.integers(1, 4), max_size=30))
def test_bytes_that_are_no_text_are_let_go(data: bytes, cuts: list[int], groups: list[int]) -> None:
    """Whatever the bytes and whatever comes at once, what is given out begins the decoding of all, and keeps up."""
    tokenizer = Pieces([*cut(data, cuts), *([b"."] * (_UNDECIDED + 1))])
    detokenizer = IncrementalDetokenizer(tokenizer.decode)
    tokens = list(range(len(tokenizer.pieces)))
    given_out = ""
    for size in groups:
        given_out += detokenizer.push(tokens[:size])
        tokens = tokens[size:]
    given_out += detokenizer.push(tokens)
    assert given_out == tokenizer.decode(range(len(tokenizer.pieces)))


def test_invalid_bytes_do_not_wait_for_ever() -> None:
    parts = pushed(Pieces([b"\xff"] * 30))
    assert "".join(parts).count("\ufffd") > 30 - 2 * _UNDECIDED


@pytest.mark.parametrize("piece", [b"ab", "日".encode(), b"\xff"])
def test_the_work_for_a_token_does_not_grow(piece: bytes) -> None:
    tokenizer = Pieces([piece] * 2000)
    pushed(tokenizer)
    assert tokenizer.decoded < 2000 * 50


def test_tokens_that_always_end_within_a_character() -> None:
    data = ("日本語" * 500).encode()
    tokenizer = Pieces([data[:2], *(data[i : i + 3] for i in range(2, len(data), 3))])
    assert "".join(pushed(tokenizer)) == "日本語" * 500
    assert tokenizer.decoded < 1500 * 50


def test_tokens_without_text() -> None:
    assert pushed(Pieces([b"", b"a", b"", b"", b"b"])) == ["", "a", "", "", "b"]
