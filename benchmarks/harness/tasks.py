"""Tasks made of the documentation of this repository, as files that the harness reads without a network."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TASKS = {
    "endings": "the next 4 to 12 words of a passage of 30 to 120 words, among those of three others",
    "letters": "the same as A, B, C or D, after three solved examples",
    "perplexity": "passages of 200 words, each as a whole",
}
_CHOICES = 4
_EXAMPLES = 3

Line = dict[str, Any]


def write_tasks(folder: Path, text: str, count: int, seed: int = 1) -> None:
    """Write `count` questions of each task, and its definition."""
    words, drawn = text.split(), random.Random(seed)
    passages = [_ending(words, drawn) for _ in range(count + _EXAMPLES + 1)]
    endings = [_question(passages, place, drawn) for place in range(count)]
    solved = "\n\n".join(_lettered(line, solved=True) for line in _examples(passages, count, drawn))
    letters = [
        {"question": f"{solved}\n\n{_lettered(line)}", "choices": list("ABCD"), "answer": line["answer"]}
        for line in endings
    ]
    texts = [{"text": " ".join(words[at : at + 200])} for at in (drawn.randrange(len(words) - 200) for _ in endings)]
    for name, lines in (("endings", endings), ("letters", letters), ("perplexity", texts[: max(1, count // 8)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(_definition(folder, name)), encoding="utf-8")


def _ending(words: list[str], drawn: random.Random) -> tuple[str, str]:
    length, rest = drawn.randint(30, 120), drawn.randint(4, 12)
    at = drawn.randrange(len(words) - length - rest)
    return " ".join(words[at : at + length]), " ".join(words[at + length : at + length + rest])


def _question(passages: list[tuple[str, str]], place: int, drawn: random.Random) -> Line:
    others = drawn.sample([each for each in range(len(passages)) if each != place], _CHOICES - 1)
    choices = [passages[each][1] for each in others]
    answer = drawn.randrange(_CHOICES)
    choices.insert(answer, passages[place][1])
    return {"question": passages[place][0], "choices": choices, "answer": answer}


def _examples(passages: list[tuple[str, str]], count: int, drawn: random.Random) -> list[Line]:
    return [_question(passages, count + number, drawn) for number in range(_EXAMPLES)]


def _lettered(line: Line, *, solved: bool = False) -> str:
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", line["choices"], strict=True))
    answer = f" {'ABCD'[line['answer']]}" if solved else ""
    return f"Text: {line['question']}\nHow does it go on?\n{listed}\nAnswer:{answer}"


def _definition(folder: Path, name: str) -> Line:
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
    }
    if name == "perplexity":
        metrics = [{"metric": "word_perplexity"}]
        asked = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        return {**common, **asked, "metric_list": metrics}
    return {
        **common,
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc_norm"}],
    }
