"""Prompts of jobs, drawn from a fixed seed or read from a file."""

from __future__ import annotations

import json
import random
from pathlib import Path

from batchwright.request import Prompt

LINES = 96
_SEED = 20260101
_NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Eva",
    "Frank",
    "Greta",
    "Hugo",
    "Ines",
    "Jonas",
    "Karin",
    "Leo",
    "Mona",
    "Nils",
    "Olga",
    "Paul",
    "Rosa",
    "Sven",
    "Tina",
    "Uwe",
]
_CITIES = ["Oslo", "Lima", "Cairo", "Paris", "Kyoto", "Perth", "Turin", "Leeds", "Quito", "Minsk"]
_TRADES = ["baker", "nurse", "pilot", "lawyer", "farmer", "teacher", "painter", "miner"]
_GOODS = ["apples", "pencils", "bottles", "tickets", "stamps", "candles"]
_FAULTS = (
    "cannot log in since the update",
    "was charged twice this month",
    "gets no mail from the shop",
    "sees a blank page after paying",
    "wants the order to go to another address",
)


def jobs(questions: Path | None) -> dict[str, list[Prompt]]:
    """Return the prompts of each job; `questions` is a JSONL file whose lines have a `question`, for one more.

    Raises ValueError if it has too few of them.
    """
    draw = random.Random(_SEED)
    found: dict[str, list[Prompt]] = {
        "facts as JSON": [_facts(draw) for _ in range(LINES)],
        "word problems": [_chat("Show each calculation on a line of its own.", _problem(draw)) for _ in range(LINES)],
        "support tickets": [
            _chat("You sort support tickets. Name the topic and the urgency, each with a reason.", _ticket(draw))
            for _ in range(LINES)
        ],
    }
    if questions is not None:
        with questions.open(encoding="utf-8") as file:
            texts = [json.loads(line)["question"] for line in file][:LINES]
        if len(texts) < LINES:
            raise ValueError(f"{questions}: has {len(texts)} questions; give a file with at least {LINES}")
        found[questions.name] = [_chat("You are a helpful assistant.", text) for text in texts]
    return found


def _chat(system: str, user: str) -> Prompt:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _facts(draw: random.Random) -> str:
    def person() -> tuple[str, str]:
        name, city, trade, age = draw.choice(_NAMES), draw.choice(_CITIES), draw.choice(_TRADES), draw.randrange(20, 70)
        facts = {"name": name, "age": age, "profession": trade, "city": city}
        return f"{name} is a {age}-year-old {trade} who lives in {city}.", json.dumps(facts)

    shots = "\n".join("Text: {}\nJSON: {}".format(*person()) for _ in range(3))
    return f"Extract the facts as JSON.\n{shots}\nText: {person()[0]}\nJSON:"


def _problem(draw: random.Random) -> str:
    name, goods, boxes = draw.choice(_NAMES), draw.choice(_GOODS), draw.randrange(3, 30)
    return (
        f"{name} buys {boxes} boxes with {draw.randrange(4, 40)} {goods} each, gives {draw.randrange(5, 60)} of them "
        f"to a friend and sells the rest for ${draw.randrange(2, 9)} each. How much does {name} get?"
    )


def _ticket(draw: random.Random) -> str:
    return (
        f"{draw.choice(_NAMES)} from {draw.choice(_CITIES)} {draw.choice(_FAULTS)}, {draw.randrange(2, 30)} days ago."
    )
