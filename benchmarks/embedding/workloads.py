"""What is embedded: questions, and texts of log-normal lengths, from a fixed seed and the same for every system."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

SEED = 20260101
NAMES = ("gsm8k", "mix")
_QUESTIONS, _TEXTS = 660, 600
_MOST_WORDS = 400
_COMMON = (
    "the of and to in is that it was for on are as with his they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more write go see number no way could people my than "
    "first water been call who oil its now find long down day did get come made may part over new sound take only "
    "little work know place year live me back give most very after thing our just name good sentence man think say "
    "great where help through much before line right too mean old any same tell boy follow came want show also around "
    "form three small set put end does another well large must big even such because turn here why ask went men read "
    "need land different home us move try kind hand picture again change off play spell air away animal house point "
    "page letter mother answer found study still learn should world high every near add food between own below country "
    "plant last school father keep tree never start city earth eye light thought head under story saw left few while"
)
_WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    description: str
    texts: list[str]


def find_workload(name: str, data: Path | None = None) -> Workload:
    """`data`: the questions of `gsm8k`, JSON lines with `question`; without it, texts of similar lengths are generated.

    Raises ValueError for an unknown name, or a file without questions.
    """
    draw = random.Random(f"{SEED}/{name}")
    if name == "mix":
        lengths = [round(draw.lognormvariate(math.log(60), 1.0)) for _ in range(_TEXTS)]
        texts = [_text(draw, length) for length in lengths]
        return Workload(name, f"{_TEXTS} texts of log-normal length, median 60 words, sigma 1", texts)
    if name != "gsm8k":
        raise ValueError(f"workload {name!r}: must be one of {', '.join(NAMES)}")
    if data is None:
        texts = [_text(draw, round(draw.gauss(46, 18))) for _ in range(_QUESTIONS)]
        return Workload(name, f"{_QUESTIONS} made-up texts as long as the questions of GSM8K", texts)
    return Workload(name, f"the questions in {data.name}", _questions(data))


def _questions(data: Path) -> list[str]:
    try:
        texts = [json.loads(line)["question"] for line in data.read_text(encoding="utf-8").splitlines()]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{data}: every line must be a JSON object with a question: {error}") from error
    if not texts:
        raise ValueError(f"{data} is empty")
    return texts


def _text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=min(_MOST_WORDS, max(1, words)))) + "."
