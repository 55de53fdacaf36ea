"""The perplexity benchmark: its documents, its figures against transformers' own loss, and the whole command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from benchmarks.perplexity.cli import app
from benchmarks.perplexity.measure import Scores, score
from benchmarks.perplexity.texts import documents, own_text, read
from tests.engine.support import TINY, tiny_model
from typer.testing import CliRunner

from batchwright.engine.tokenizer import Tokenizer

PIECES = [[5, 9, 33, 100, 7], [2, 3], list(range(60))]


def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "llama", **TINY)
    with torch.inference_mode():
        logits = [model(torch.tensor([piece])).logits[0, :-1].double() for piece in PIECES]
    logs = torch.cat([each.log_softmax(-1) for each in logits])
    said = torch.tensor([token for piece in PIECES for token in piece[1:]])
    expected = -logs.gather(1, said[:, None])[:, 0]
    exact, rounded, whole = (score(tmp_path, PIECES, name) for name in ("float32", "bfloat16", "int8"))
    torch.testing.assert_close(exact.losses, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(exact.likeliest, logs.argmax(-1))
    assert math.isclose(exact.perplexity, math.exp(float(expected.mean())), rel_tol=1e-4)
    assert "int8" in whole.implementation
    assert "float32 on" in exact.implementation
    for other in (rounded, whole):
        above, error = other.above(exact)
        assert math.isclose(other.perplexity, exact.perplexity * (1 + above), rel_tol=1e-9)
        assert 0 < error < 0.2
        assert abs(above) < 0.2
        assert other.agreement(exact) > 0.7


def test_figures_by_hand() -> None:
    one = Scores(torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([1, 2, 3]), "")
    two = Scores(torch.tensor([1.0, 2.5, 3.1]).double(), torch.tensor([1, 2, 4]), "")
    assert one.perplexity == pytest.approx(math.exp(2))
    above, error = two.above(one)
    assert above == pytest.approx(math.exp(0.2) - 1)
    assert error == pytest.approx(2 * torch.tensor([0.0, 0.5, 0.1]).std().item() / math.sqrt(3))
    assert two.agreement(one) == pytest.approx(2 / 3)


def test_documents(smollm2_path: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path, 49152)
    texts = ["A short one.", "And another that is somewhat longer than the first.", "Never reached."]
    ids = [tokenizer.encode(text) for text in texts]
    pieces = documents(texts, tokenizer, window=5, tokens=len(ids[0]) + 7)
    assert pieces == [ids[0], ids[1][:5], ids[1][5:7]]
    assert len(tokenizer.encode(own_text())) > 10_000
    lines = tmp_path / "questions.jsonl"
    lines.write_text(json.dumps({"question": "Why?", "n": 3, "answer": "Because."}) + "\n\n")
    assert read(lines) == ["Why?\nBecause."]
    lines.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1: must be a JSON object with texts"):
        read(lines)


def test_the_command(shallow_path: Path, tmp_path: Path) -> None:
    text, page = tmp_path / "text.txt", tmp_path / "page.md"
    text.write_text("The capital of France is Paris, and that of Italy is Rome.")
    done = CliRunner().invoke(app, ["--text", str(text), "--model", str(shallow_path), "--save", str(page)])
    assert done.exit_code == 0, done.output
    assert "text.txt, 1 documents" in done.stdout
    for precision in ("float32", "bfloat16", "int8"):
        assert f"| {precision} " in page.read_text()
    text.write_text("A")
    assert CliRunner().invoke(app, ["--text", str(text), "--model", str(shallow_path)]).exit_code == 2
