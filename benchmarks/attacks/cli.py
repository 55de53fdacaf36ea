"""The command: a fresh service for each section, its figures, and the page of all."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.attacks import report
from benchmarks.attacks.attack import Attack, Figure
from benchmarks.attacks.quiet import ask
from benchmarks.attacks.sections import ATTACKS
from benchmarks.attacks.service import ROOT, NotStarted, endpoint, serving

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

_WARMING = 5
"""Requests before each attack."""
_RESULTS = ROOT / "benchmarks" / "results"


@app.command()
def hostile(
    only: Annotated[str, typer.Option(help=f"Sections, with commas: {', '.join(a.name for a in ATTACKS)}.")] = "",
    source: Annotated[
        Path | None,
        typer.Option(file_okay=False, exists=True, help='Attack the service of this checkout; the column "before".'),
    ] = None,
    json_file: Annotated[
        Path, typer.Option("--json", dir_okay=False, help="Figures of all runs; those of this one are put in.")
    ] = _RESULTS / "hostile.json",
    save: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the page of all figures in that file here.")
    ] = None,
) -> None:
    """Attack a service that is started for it, and show what others feel of it. Every section is bounded in time."""
    chosen = _chosen(only)
    column = report.AFTER if source is None else report.BEFORE
    findings = report.load(json_file)
    missed = []
    for attack in chosen:
        print(f"{attack.name} …", file=sys.stderr, flush=True)
        try:
            figures = _attacked(attack, source)
        except (NotStarted, TimeoutError) as error:
            raise typer.BadParameter(f"{attack.name}: {error or f'took more than {attack.seconds:g} s'}") from error
        findings.setdefault(attack.name, {})[column] = report.entry(figures, _revision(source or ROOT))
        report.save(json_file, findings)
        missed += [f"{attack.name}: {each.name} {each.value} {each.unit}" for each in figures if each.missed]
    page = report.page(ATTACKS, findings)
    print(page)
    if save is not None:
        save.write_text(page, encoding="utf-8")
    if missed and source is None:
        print("missed: " + "; ".join(missed), file=sys.stderr)
        raise typer.Exit(1)


def _chosen(only: str) -> list[Attack]:
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {attack.name: attack for attack in ATTACKS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]}: choose from {', '.join(known)}")
    return [known[name] for name in names] if names else list(ATTACKS)


def _attacked(attack: Attack, source: Path | None) -> list[Figure]:
    """Run one section against a fresh service, which holds nothing from the previous one."""
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="batchwright-hostile-")))
        flags = [*attack.flags, *(attack.new_flags if source is None else ())]
        if attack.backend == "scripted":
            flags += ["--backend", opened.enter_context(endpoint(attack.endpoint_flags))]
        service = opened.enter_context(serving(source or ROOT, folder, flags, attack.descriptors))

        async def bounded() -> list[Figure]:
            async with asyncio.timeout(attack.seconds):
                # What is created at the first request must not count as an effect of the attack.
                for _ in range(_WARMING):
                    await ask(service)
                return list(await attack.run(service))

        return asyncio.run(bounded())


def _revision(checkout: Path) -> str:
    """The commit of a checkout, or its folder's name if it is not one."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or checkout.name
