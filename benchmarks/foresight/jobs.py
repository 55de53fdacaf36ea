"""Jobs of token ids, drawn by a seed: few-shot prompts, identical lines, and lines that share nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_ID, _IDS = 1000, 20_000
"""Ids that are ordinary text in any vocabulary of a usual size."""


@dataclass(frozen=True, slots=True)
class TokenLine:
    """A prompt, and the exact number of tokens of its answer."""

    prompt: list[int]
    answer: int

    def body(self) -> dict[str, object]:
        """The line of a file."""
        return {"prompt": self.prompt, "max_tokens": self.answer, "ignore_eos": True, "temperature": 0}


def _tokens(drawn: random.Random, count: int) -> list[int]:
    return [_FIRST_ID + drawn.randrange(_IDS) for _ in range(count)]


def few_shot(seed: int, *, lines: int = 400, prefixes: int = 20, shared: int = 600) -> list[TokenLine]:
    """Lines that begin with one of `prefixes` examples of about `shared` tokens, one after the other."""
    drawn = random.Random(seed)
    beginnings = [_tokens(drawn, drawn.randint(shared - 40, shared + 40)) for _ in range(prefixes)]
    return [
        TokenLine(beginnings[number % prefixes] + _tokens(drawn, drawn.randint(10, 40)), drawn.randint(4, 24))
        for number in range(lines)
    ]


def apart(seed: int, *, lines: int = 300) -> list[TokenLine]:
    """Lines of many sizes that share nothing."""
    drawn = random.Random(seed)
    return [TokenLine(_tokens(drawn, drawn.randint(16, 200)), drawn.randint(8, 64)) for _ in range(lines)]


def answers_mostly(seed: int, *, lines: int = 600) -> list[TokenLine]:
    """Lines whose answers are longer than their prompts, which share nothing."""
    drawn = random.Random(seed)
    return [TokenLine(_tokens(drawn, drawn.randint(4, 15)), drawn.randint(16, 96)) for _ in range(lines)]


def prompts_and_answers(seed: int, *, lines: int = 400) -> list[TokenLine]:
    """Lines of which half, which come first, are nearly all prompt, and half nearly all answer."""
    drawn = random.Random(seed)
    prompts = [TokenLine(_tokens(drawn, drawn.randint(250, 500)), drawn.randint(1, 4)) for _ in range(lines // 2)]
    return prompts + [TokenLine(_tokens(drawn, drawn.randint(8, 16)), drawn.randint(60, 120)) for _ in prompts]


def with_copies(seed: int, own: Sequence[TokenLine], *, copies: float = 0.3) -> list[TokenLine]:
    """These lines mixed with copies, a share `copies` of all lines, each of which is the same as one of them."""
    drawn = random.Random(seed)
    lines = round(len(own) / (1.0 - copies))
    mixed = [*own, *(drawn.choice(own) for _ in range(lines - len(own)))]
    drawn.shuffle(mixed)
    return mixed


def renamed(lines: Sequence[TokenLine], turn: int) -> list[TokenLine]:
    """The lines with every token id moved by the same number."""
    return [TokenLine([token + turn for token in line.prompt], line.answer) for line in lines]


def blocks_needed(lines: Sequence[TokenLine], prefixes: int, block: int = 16) -> int:
    """KV blocks for `prefixes` of the longest lines."""
    longest = sorted((len(line.prompt) + line.answer for line in lines), reverse=True)[:prefixes]
    return sum(-(-tokens // block) for tokens in longest)
