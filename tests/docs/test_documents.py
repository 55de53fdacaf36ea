"""The documents' examples run as pasted and print what stands below them; the script draws the pictures."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import yaml
from pictures.document import Block, blocks, expected, output_of, renew
from settings_page import page
from site_pages import cli_reference, hooks, http_reference, python_reference
from site_pages.hooks import GENERATED
from tests.preloaded import interpreter, listening

import batchwright
from batchwright.models.cache import CACHE_VARIABLE
from batchwright.models.wheels import WHEELS_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
BATCHING = ROOT / "docs" / "batching.md"
TEXT = BATCHING.read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("**/*.md"),
    *(ROOT / "benchmarks").glob("**/*.md"),
]
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
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

EACH_BY_ITSELF = """
import json, sys
for body in json.loads(sys.argv[1]):
    exec(compile(body, "block", "exec"), {"__name__": "__main__"})
"""
"""Programs in one process, none of which sees a name of another."""


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
    section = README.split("## Batching any function")[1].split("\n## ")[0]
    example = next(block.body for block in blocks(section) if block.language == "python")
    assert output_of(example) == f"{list(range(100))}\n"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 220


@pytest.mark.needs_model
def test_what_the_readme_says_about_files_works_as_pasted(tmp_path: Path, smollm2_path: Path, preloaded: Path) -> None:
    """With the default model itself."""
    _run_as_pasted(_about_files(README), tmp_path, preloaded)
    assert (tmp_path / "adverts.csv").read_text().startswith("id,product,feature,answer,finish_reason,error,")


@pytest.mark.needs_model
def test_what_the_page_about_files_says_works_as_pasted(tmp_path: Path, shallow_cache: Path, preloaded: Path) -> None:
    text = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
    _run_as_pasted(_about_files(text), tmp_path, preloaded, shallow_cache)


@pytest.mark.needs_model
@pytest.mark.parametrize(
    "page", ["tutorials/file", "tutorials/function", *(f"how-to/{page.stem}" for page in HOW_TO)], ids=str
)
def test_tutorials_and_how_to_pages_work_as_pasted(
    page: str, tmp_path: Path, shallow_cache: Path, preloaded: Path
) -> None:
    """In their order, in one folder."""
    told = blocks((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    kept = [block for block in told if block.language in ("bash", "python") and "make install" not in block.body]
    _run_as_pasted(kept, tmp_path, preloaded, shallow_cache)


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment, so to say, in whose commands all is imported already."""
    folder = tmp_path_factory.mktemp("preloaded")
    (folder / "bin").mkdir()
    with listening(folder / "socket"):
        begin = shlex.join(interpreter(folder / "socket"))
        for name, command in (("python", begin), ("batchwright", f"{begin} -m batchwright")):
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        yield folder


def _about_files(text: str) -> list[Block]:
    return [
        block
        for block in blocks(text)
        if (block.language == "bash" and " run " in block.body)
        or (block.language == "python" and "batchwright.run" in block.body)
    ]


def _run_as_pasted(told: list[Block], folder: Path, virtual_environment: Path, cache: Path | None = None) -> None:
    """Run blocks in their order, those of Python that follow each other in one process."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / ".venv").symlink_to(virtual_environment)
    environment = {**os.environ, **({} if cache is None else {CACHE_VARIABLE: str(cache)})}
    for language, group in groupby(told, key=lambda block: block.language):
        bodies = [block.body for block in group]
        if language == "python":
            bodies = [shlex.join([".venv/bin/python", "-c", EACH_BY_ITSELF, json.dumps(bodies)])]
        for body in bodies:
            _assert_ends_well(["bash", "-euo", "pipefail", "-c", body], folder, environment)


def _assert_ends_well(command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, f"{command[-1]}\n{ran.stdout}\n{ran.stderr}"


def test_the_tutorial_about_the_service_works_as_pasted(
    service: tuple[str, dict[str, str]], tmp_path: Path, preloaded: Path
) -> None:
    url, environment = service
    page = (ROOT / "docs" / "tutorials" / "service.md").read_text(encoding="utf-8")
    printed = []
    for block in blocks(page):
        if block.language == "python":
            command = [str(preloaded / "bin" / "python"), "-c", block.body.replace("http://127.0.0.1:8000", url)]
            ran = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
            )
            assert ran.returncode == 0, f"{block.body}\n{ran.stdout}\n{ran.stderr}"
            printed.append(ran.stdout)
    online, batch = printed
    assert online.strip()
    assert {line.split()[0] for line in batch.splitlines() if line.startswith("river-")} >= {"river-1", "river-5"}


def test_every_public_name_is_documented_under_one_subject() -> None:
    assert python_reference.undocumented() == []
    assert sum(map(len, python_reference.subjects().values())) == len(batchwright.__all__) - 1


def test_references_are_made_from_the_code() -> None:
    commands, interface = cli_reference.page(), http_reference.page()
    for told in ("## batchwright run", "`--prompt-template TEXT`", "### batchwright jobs submit"):
        assert told in commands
    for told in ("### `POST /v1/batches`", "[BatchObject](#object-batchobject)", "### BatchObject"):
        assert told in interface


@pytest.mark.parametrize(
    ("text", "source", "address", "led"),
    [
        ("[a](docs/files.md)", "README.md", "index.md", "[a](files.md)"),
        ("[a](../../README.md#more)", "docs/tutorials/file.md", "tutorials/file.md", "[a](../index.md#more)"),
        ("[a](../benchmarks/results/forecast.md)", "docs/files.md", "files.md", "[a](benchmarks/forecast.md)"),
        ("[a](forecast.md)", "benchmarks/results/README.md", "benchmarks/index.md", "[a](forecast.md)"),
        ("![a](docs/pictures/speed.svg)", "README.md", "index.md", "![a](pictures/speed.svg)"),
        ("[`a`](../src/batchwright/cli/run.py)", "docs/design.md", "design.md", "`a`"),
        ("[a](#b) [c](https://example.org/d.md)", "docs/design.md", "design.md", None),
    ],
)
def test_links_lead_to_where_pages_are_in_the_site(text: str, source: str, address: str, led: str | None) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=address))
    assert hooks.on_page_markdown(text, page) == (text if led is None else led)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
        made = (page.parent / target).resolve() in [ROOT / "docs" / address for address in GENERATED]
        assert "://" in target or made or (page.parent / target).exists(), target


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, shallow_cache: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a service with the default models, and the environment of commands on its store."""
    folder = tmp_path_factory.mktemp("service")
    settings = {name for name in os.environ if name.startswith("BATCHWRIGHT_")} - {WHEELS_VARIABLE}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
    environment = kept | {
        "BATCHWRIGHT_DATA": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        CACHE_VARIABLE: str(shallow_cache),
    }
    command = [sys.executable, "-m", "batchwright", "serve", "--port", "0", "--log-format", "json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            told = next((line for line in process.stderr if '"event": "serving"' in line), "")
            assert told, "the service did not start"
            # Nobody reads the rest; the pipe must not fill up.
            Thread(target=process.stderr.read, daemon=True).start()
            yield json.loads(told)["url"], environment
        finally:
            process.terminate()


def test_the_lines_about_the_service_work_as_pasted(
    service: tuple[str, dict[str, str]], tmp_path: Path, preloaded: Path
) -> None:
    """In their order, each block in a shell of its own."""
    url, environment = service
    (tmp_path / ".venv").symlink_to(preloaded)
    section = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")
    printed = []
    for block in blocks(section):
        lines = block.body.replace("http://127.0.0.1:8000", url)
        if "make install" in lines:
            continue
        command = {"bash": ["bash", "-euo", "pipefail", "-c", lines], "python": [".venv/bin/python", "-c", lines]}
        ended = subprocess.run(
            command[block.language],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ended.returncode == 0, f"{lines}\n{ended.stdout}\n{ended.stderr}"
        assert '{"error"' not in ended.stdout
        printed.append(ended.stdout)
    online, batch, client, simple, tables, keys = printed
    assert online.count('"object":"chat.completion"') == 1
    assert online.count("data: ") > 2
    assert "data: [DONE]" in online
    assert online.count('"object":"embedding"') == 2
    for output in (batch, client):
        results = [json.loads(line) for line in output.splitlines() if line.startswith('{"id":"batch_req_')]
        assert [(line["custom_id"], line["response"]["status_code"]) for line in results] == [("a", 200), ("b", 200)]
    assert '"throughput_tokens_per_sec"' in simple
    assert '"total_batches":1' in simple
    [found] = json.loads(tables)["data"]
    assert (found["line"], found["prompt"]) == (1, "Is this good or bad? Great value.")
    assert '"id":"smollm2-135m"' in keys


def test_what_deployment_sets_are_settings() -> None:
    from batchwright.jobs.remote.results import STATE_VARIABLE
    from batchwright.service.setting_sources import CONFIG_VARIABLE
    from batchwright.service.settings import ENV_PREFIX, Settings

    others = {CACHE_VARIABLE, CONFIG_VARIABLE, STATE_VARIABLE}
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | others
    for file in filter(Path.is_file, (ROOT / "deploy").rglob("*")):
        named = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", file.read_text(encoding="utf-8")))
        assert named <= known, f"{file.name} sets {named - known}"


def test_the_compose_file_is_well_formed() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert set(services) == {"batchwright", "postgres"}
    assert (ROOT / "deploy" / services["batchwright"]["build"]["context"] / "deploy" / "Dockerfile").is_file()


@pytest.mark.parametrize("page", ["operations", "reliability", "settings", "metrics", "webhooks"])
def test_pages_of_the_service_name_what_exists(page: str) -> None:
    """Links lead somewhere, and the metrics and flags that a page names are there."""
    from batchwright.service.settings import Settings

    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        there = ROOT / "docs" / (target or f"{page}.md")
        assert there.exists(), f"{page}.md links to {target}"
        assert not anchor or anchor in _anchors(there), f"{page}.md links to {target}#{anchor}"
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in re.findall(r"\bbatchwright_[a-z_]+", text):
        assert f"`{name.removesuffix('_bucket')}`" in metrics, f"{page}.md names the metric {name}"
    flags = {name.replace("_", "-") for name in Settings.model_fields}
    others = {"config", "tenant", "wait"} | {f"no-{flag}" for flag in flags}
    for flag in re.findall(r"`(?:serve )?--([a-z-]+)", text):
        assert flag in flags | others, f"{page}.md names the flag --{flag}"


def _anchors(page: Path) -> set[str]:
    titles = re.findall("^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


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


def test_every_file_that_the_design_names_exists() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src" / "batchwright").rglob("*") if path.is_file()]
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|cpp|h|sql)|(?:\w+/)+)`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 60
    assert [name for name in named if not any(f"/{name}" in f"/{file}" for file in files)] == []


def test_the_page_of_settings_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page(), "run: python docs/settings_page.py > docs/settings.md"


def test_pictures_are_there_and_used() -> None:
    pattern = r"!\[[^\]]+\]\((?:docs/)?pictures/([\w-]+)\.svg\)"
    used, of_readme = set(re.findall(pattern, TEXT)), set(re.findall(pattern, README))
    assert used | of_readme == {path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    from pictures.catalogue import PICTURES

    assert used == set(PICTURES)


def test_the_chart_of_the_readme_shows_the_committed_figures(tmp_path: Path) -> None:
    from pictures.readme import speed

    speed(tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").read_bytes() == (ROOT / "docs" / "pictures" / "speed.svg").read_bytes()


def test_links_within_the_page_lead_somewhere() -> None:
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= _anchors(BATCHING)


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
