"""A text is refused before it is tokenized whole only if it has too many tokens, whatever is in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from batchwright.engine import long_texts
from batchwright.engine.long_texts import LongTexts

_WORDS = {
    word: token for token, word in enumerate(["[UNK]", "[MASK]", "a", "b", "ab", "##a", "##b", "!", "[", "]", "中"])
}
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_BYTES = {letter: token for token, letter in enumerate(_LETTERS)} | {"ab": 256, "aba": 257, "Ġa": 258, "ĠĠ": 259}
_SPELLED = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = ["<unk>", "▁", "a", "b", "▁a", "ab", "▁ab", "é", *_SPELLED]


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(_WORDS, unk_token="[UNK]", max_input_chars_per_word=5))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True)])
    return tokenizer


def byte_level(normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(_BYTES, [("a", "b"), ("ab", "a"), ("Ġ", "a"), ("Ġ", "Ġ")]))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def without_controls() -> Tokenizer:
    """Some models have no token for control characters, and drop them."""
    kept = [letter for letter in _LETTERS if letter not in "ĀāĂĊ"]
    tokenizer = Tokenizer(models.BPE({letter: token for token, letter in enumerate(kept)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece() -> Tokenizer:
    vocabulary = {piece: token for token, piece in enumerate(_PIECES)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def unigram() -> Tokenizer:
    scores = [("<unk>", 0.0), ("▁", -2.0), ("a", -3.0), ("b", -3.0), ("▁a", -2.5), ("ab", -2.5), ("▁ab", -2.6)]
    tokenizer = Tokenizer(models.Unigram(scores, 0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


_KINDS = {
    "bert": bert,
    "byte-level": byte_level,
    "byte-level, NFC": lambda: byte_level(normalizers.NFC()),
    "byte-level, accents dropped": lambda: byte_level(
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "byte-level, controls dropped": without_controls,
    "sentence-piece": sentence_piece,
    "unigram": unigram,
}
_PARTS = (
    *("a", "b", "ab", "ba", "a b", "x" * 9),
    *(" ", "  ", "\n", "\t", "!", "[", "]", "[]"),
    *("[MASK]", " [MASK]", "中", "é", "e\u0301", "\u1f82", "\u0301"),
)
_TEXTS = st.lists(st.sampled_from(_PARTS), max_size=60).map("".join)


@pytest.mark.parametrize("kind", _KINDS)
@given(text=_TEXTS, most=st.integers(1, 30))
@example(text="\u1f82" * 30, most=7)
@example(text="[MASK]" * 20, most=20)
@example(text="\n" * 90 + "a", most=1)
@example(text="x" * 200, most=1)
@settings(deadline=None)
def test_what_fits_is_not_refused(kind: str, text: str, most: int) -> None:
    tokenizer = _KINDS[kind]()
    with pytest.MonkeyPatch.context() as patch:
        # Cuts everywhere, and no slack that would hide a wrong one.
        patch.setattr(long_texts, "_LEAST_PIECE", 1)
        patch.setattr(long_texts, "_PIECE_PER_TOKEN", 0)
        patch.setattr(long_texts, "_SLACK", 0)
        least = LongTexts(tokenizer).least_tokens(text, most)
    count = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert least is None or most < least <= count


@pytest.mark.parametrize(("kind", "words"), [
    *((kind, "ab a ") for kind in _KINDS),
    ("bert", "!"),
    ("bert", "ab\n"),
    ("sentence-piece", "\n"),
    ("sentence-piece", " "),
])  # fmt: skip
def test_far_too_much_is_told(kind: str, words: str) -> None:
    least = LongTexts(_KINDS[kind]()).least_tokens(words * 100_000, 256)
    assert least is not None
    assert least > 256


class _Spied:
    """Counts the characters that it is given."""

    def __init__(self, inner: Tokenizer) -> None:
        self.characters = 0
        self._inner = inner

    def encode(self, text: str, **options: bool) -> Any:
        self.characters += len(text)
        return self._inner.encode(text, **options)


def test_only_a_beginning_is_tokenized() -> None:
    tokenizer = bert()
    texts, spied = LongTexts(tokenizer), _Spied(tokenizer)
    texts._tokenizer = spied  # type: ignore[assignment]
    for text in ("a b " * 1_000_000, "!" * 4_000_000, "]" * 4_000_000, "中" * 1_000_000):
        assert texts.least_tokens(text, 256) is not None
    assert spied.characters < 200_000


def test_a_long_text_of_few_tokens_fits() -> None:
    for text in (" " * 100_000, "x" * 100_000):
        assert LongTexts(bert()).least_tokens(text, 256) is None


def test_a_text_without_a_place_to_cut_is_not_tokenized_twice() -> None:
    tokenizer = bert()
    texts, spied = LongTexts(tokenizer), _Spied(tokenizer)
    texts._tokenizer = spied  # type: ignore[assignment]
    assert texts.least_tokens("x" * 100_000, 256) is None
    assert spied.characters == 0
