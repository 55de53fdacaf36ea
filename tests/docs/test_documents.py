"""The documents' examples run as pasted and print what stands below them; the script draws the pictures."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pictures.document import Block, blocks, expected, output_of, renew

ROOT = Path(__file__).resolve().parents[2]
BATCHING = ROOT / "docs" / "batching.md"
TEXT = BATCHING.read_text(encoding="utf-8")
ALONE = """
import sys
for name in ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "matplotlib"):
    sys.modules[name] = None
sys.path.insert(0, "docs")
from pathlib import Path
from pictures.document import blocks, output_of
for block in blocks(Path("docs/batching.md").read_text(encoding="utf-8")):
    if block.language == "python":
        output_of(block.body)
print("all run")
"""


def _name(block: Block) -> str:
    return f"line {block.line}"


@pytest.mark.parametrize("block", [block for block in blocks(TEXT) if block.language == "text"], ids=_name)
def test_an_output_is_what_the_code_prints(block: Block) -> None:
    assert block.code is not None or block.stats is not None, "output of nothing"
    assert expected(block) == block.body, "python docs/pictures/draw.py writes it anew"


@pytest.mark.parametrize("block", [block for block in blocks(TEXT) if block.language == "python"], ids=_name)
def test_a_line_is_not_wider_than_the_page(block: Block) -> None:
    assert max(map(len, block.body.splitlines())) <= 120


def test_examples_need_the_base_install_only() -> None:
    """But for the one about Prometheus. In a process of its own: here torch is loaded."""
    ran = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.stdout == "all run\n", ran.stderr


def test_the_example_of_the_readme_runs() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Batching any function")[1].split("\n## ")[0]
    example = next(block.body for block in blocks(section) if block.language == "python")
    assert output_of(example) == f"{list(range(100))}\n"


def test_every_metric_is_in_the_table_and_nothing_else() -> None:
    from prometheus_client import CollectorRegistry

    from batchwright import Batcher, export_metrics

    registry = CollectorRegistry()
    batcher = Batcher(lambda texts: texts)
    export_metrics(batcher, "any", registry)
    names = {
        family.name.removeprefix("batchwright_batcher_") + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
    }
    table = TEXT.split("| name | labels | meaning |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == names
    asyncio.run(batcher.close())


def test_pictures_are_there_and_used() -> None:
    used = set(re.findall(r"!\[[^\]]+\]\(pictures/([\w-]+)\.svg\)", TEXT))
    assert used == {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    from pictures.catalogue import PICTURES

    assert used == set(PICTURES)


def test_links_within_the_page_lead_somewhere() -> None:
    titles = {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall("^#+ (.+)$", TEXT, re.M)
    }
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= titles


def test_the_script_draws_the_same_picture_each_time(tmp_path: Path) -> None:
    drawn = []
    for folder in ("once", "again"):
        command = [sys.executable, "docs/pictures/draw.py", "simple", "--to", str(tmp_path / folder)]
        subprocess.run(command, cwd=ROOT, check=True)
        drawn.append((tmp_path / folder / "simple.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"<?xml")
    assert b"max_wait" in drawn[0]


def test_the_script_refuses_a_picture_that_it_does_not_know() -> None:
    command = [sys.executable, "docs/pictures/draw.py", "nonsense"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "choose from auto, simple" in ran.stderr


def test_outputs_are_written_below_their_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nprint(1 + 1)\n```\n\n```text\nold\n```\n\nMore.\n\n```text\nkept\n```\n")
    renew(page)
    assert page.read_text().endswith("\n```text\n2\n```\n\nMore.\n\n```text\nkept\n```\n")


def test_tests_of_an_example_are_run() -> None:
    with pytest.raises(AssertionError):
        output_of("def test_arithmetic():\n    assert 1 + 1 == 3\n")
