"""The command: run each setting in a process of its own, print the table."""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from batchwright.models import DEFAULT_MODEL, resolve
from benchmarks.coserve import report
from benchmarks.coserve.report import Findings, Slo
from benchmarks.coserve.run import Outcome, Setting, run
from benchmarks.coserve.traffic import MEAN_OUTPUT

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def coserving(
    seconds: Annotated[float, typer.Option(min=1, help="Of each run that are measured.")] = 180,
    ramp: Annotated[float, typer.Option(min=0, help="Seconds of traffic before them.")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="30 seconds after 15.")] = False,
    share: Annotated[float, typer.Option(min=0.01, max=0.95, help="Online load, of the capacity.")] = 0.3,
    ttft_ms: Annotated[float, typer.Option(min=1, help="Bound on the time to the first token.")] = 1000,
    tpot_ms: Annotated[float, typer.Option(min=1, help="Bound on the mean time per token after it.")] = 80,
    model: Annotated[str, typer.Option(help="A name, folder, GGUF file or hub id.")] = DEFAULT_MODEL,
    kv_gib: Annotated[int, typer.Option(min=1, help="KV cache, GiB.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write every figure here.")] = None,
    save: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the page here, and the plot beside it.")
    ] = None,
) -> None:
    """Online requests at random times, with and without an endless batch job: what they feel, and what it makes."""
    folder = resolve(model, progress=_say)
    vocab_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    if quick:
        seconds, ramp = 30, 15
    plain = Setting("the job alone", str(folder), kv_gib, ramp, seconds, job=True)
    slo = Slo(ttft_ms, tpot_ms)
    # Its steps fill the budget: more of them would show nothing new.
    job_alone = _run(replace(plain, seconds=min(seconds, 90)), vocab_size)
    rate = share * job_alone.batch_rate / MEAN_OUTPUT
    mixed = replace(plain, rate=rate)
    alone = _run(replace(mixed, name="online alone", job=False), vocab_size)
    together = []
    for name, given, held in (
        ("with the job", slo, slo),
        ("with the job, half the SLO", half := Slo(ttft_ms / 2, tpot_ms / 2), half),
        ("with the job, no SLO", None, slo),
    ):
        setting = replace(mixed, name=name)
        if given is not None:
            setting = replace(setting, ttft_ms=given.ttft_ms, tpot_ms=given.tpot_ms)
        together.append((name, held, _run(setting, vocab_size)))
    findings = Findings(model, share, job_alone, alone, together)
    print(f"{report.runs_table(findings)}\n\n{report.bars_list(findings)}\n\n{report.learned(findings)}")
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(findings), indent=1) + "\n", encoding="utf-8")
    if save is not None:
        _save(findings, save)


def _run(setting: Setting, vocab_size: int) -> Outcome:
    """Run in a separate process: nothing of the previous run is left in memory or in threads."""
    _say(f"{setting.name}: {setting.ramp:.0f} + {setting.seconds:.0f} s, {setting.rate:.2f} requests/s")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        outcome = pool.submit(run, setting, vocab_size).result()
    if setting.rate and not outcome.served:
        raise typer.BadParameter(f"--seconds {setting.seconds:g}: no online request came in that time; give more")
    return outcome


def _save(findings: Findings, page: Path) -> None:
    from benchmarks.coserve.plot import draw

    plot = page.with_suffix(".svg")
    page.parent.mkdir(parents=True, exist_ok=True)
    plot.write_bytes(draw(findings))
    page.write_text(report.page(findings, plot.name), encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
