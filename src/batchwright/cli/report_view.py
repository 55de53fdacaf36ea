"""The report of a run for people."""

from __future__ import annotations

from rich.table import Table

from batchwright.jobs.report import Percentiles, RunReport


def report_table(report: RunReport) -> Table:
    """What the run did, a figure a line. Figures of the engine only when it computed something."""
    table = Table(title=_title(report), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("wall time", f"{report.wall_seconds:.1f} s, of which loading the model {report.load_seconds:.1f} s")
    if report.steps:
        for name, value in _engine_rows(report):
            table.add_row(name, value)
    memory = _size(report.peak_memory_bytes)
    if report.peak_gpu_bytes is not None:
        memory += f", {_size(report.peak_gpu_bytes)} on the GPU"
    table.add_row("peak memory", memory)
    return table


def _title(report: RunReport) -> str:
    end = "Interrupted" if report.interrupted else "Done"
    lines = f"{report.done:,} of {report.total:,} lines"
    return f"{end}: {lines}, {report.failed:,} failed, {report.resumed:,} by earlier runs"


def _engine_rows(report: RunReport) -> list[tuple[str, str]]:
    kv_share = report.kv_blocks_peak / report.kv_blocks if report.kv_blocks else 0.0
    outside = report.outside_model_seconds / report.loop_seconds if report.loop_seconds else 0.0
    occupancy = f"{report.occupancy_mean:.1f} sequences in a step, peak {report.occupancy_peak} of"
    return [
        ("engine", report.implementation),
        ("tokens", f"{report.prompt_tokens:,} prompt, {report.generated_tokens:,} generated"),
        ("generated", f"{report.generated_tokens_per_second:,.0f} tokens/s over {report.loop_seconds:.1f} s"),
        ("prefill", f"{report.prefill_tokens_per_second:,.0f} tokens/s of model time"),
        ("decode", f"{report.decode_tokens_per_second:,.0f} tokens/s of model time"),
        ("TTFT", _percentiles(report.ttft_ms)),
        ("TPOT", _percentiles(report.tpot_ms)),
        ("occupancy", f"{occupancy} {report.max_num_seqs}, {report.steps:,} steps"),
        ("padding", f"{report.padding_efficiency:.1%} of the computed rows were useful"),
        *_drafting(report),
        ("KV cache", f"peak {report.kv_blocks_peak:,} of {report.kv_blocks:,} blocks ({kv_share:.0%})"),
        ("prefix cache", f"{report.prefix_hit_rate:.1%} of the prompt tokens found in it"),
        ("preemptions", f"{report.preemptions:,}"),
        ("outside model", f"{report.outside_model_seconds:.2f} s ({outside:.0%} of the loop)"),
    ]


def _drafting(report: RunReport) -> list[tuple[str, str]]:
    if not report.drafted_tokens:
        return []
    return [("drafting", f"{report.accepted_tokens:,} of {report.drafted_tokens:,} guessed tokens were right")]


def _percentiles(values: Percentiles) -> str:
    p50, p90, p99 = values["p50"], values["p90"], values["p99"]
    if p50 is None or p90 is None or p99 is None:
        return "none"
    return f"p50 {p50:,.0f} ms, p90 {p90:,.0f} ms, p99 {p99:,.0f} ms"


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
