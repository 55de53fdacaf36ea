"""The tables, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.embedding.fit import Fit
from benchmarks.embedding.measure import Result
from benchmarks.embedding.systems import BATCHER, OURS, PEERS, TITLES
from benchmarks.throughput.measure import Ratio
from benchmarks.throughput.report import machine, table
from benchmarks.throughput.workers.protocol import Ready


def rates_table(results: Sequence[Result]) -> str:
    """Tokens/s of every system, and how many times as fast as the peers ours is."""
    systems = [system for system in TITLES if any(system in result.seconds for result in results)]
    peers = [system for system in systems if system in PEERS]
    head = ["workload", "precision", *(TITLES[system] for system in systems), *(f"vs {TITLES[p]}" for p in peers)]
    rows = []
    for result in results:
        rates = [f"{result.rate(system):,.0f}" if system in result.seconds else "-" for system in systems]
        ratios = [_ratio(result.ratio(system)) if system in result.seconds else "-" for system in peers]
        rows.append([result.workload.name, result.dtype, *rates, *ratios])
    return table(head, rows)


def best_peer_table(results: Sequence[Result]) -> str:
    """How many times as fast as the better of the peers, offline and through a batcher."""
    rows = []
    for result in results:
        peers = [system for system in PEERS if system in result.seconds]
        if peers:
            best = max(peers, key=result.rate)
            ratios = [_ratio(result.ratio(best, ours)) for ours in (OURS, BATCHER)]
            rows.append([result.workload.name, result.dtype, TITLES[best], *ratios])
    return table(["workload", "precision", "the better peer", TITLES[OURS], TITLES[BATCHER]], rows) if rows else ""


def agreement_table(results: Sequence[Result]) -> str:
    """How far the vectors are from those of sentence-transformers (or ours, if it is not installed)."""
    systems = [system for system in TITLES if any(system in result.difference for result in results)]
    rows = [
        [
            result.workload.name,
            result.dtype,
            *(_difference(result.difference[system]) if system in result.difference else "-" for system in systems),
        ]
        for result in results
    ]
    return table(["workload", "precision", *(TITLES[system] for system in systems)], rows)


def page(
    results: Sequence[Result], ready: Mapping[str, Sequence[Ready]], fits: Sequence[Fit], threads: int, rounds: int
) -> str:
    """The whole report as a Markdown document."""
    host = machine()
    return (
        "\n\n".join(
            [
                "# Embeddings on the CPU",
                f"all-MiniLM-L6-v2, tokens embedded per second from text to vector, median of {rounds} rounds; printed"
                f" by `benchmarks/embeddings.py` on {host['date']}. {host['processor']}, {threads} threads"
                f" ({', '.join(host['features'])}), Python {host['python']}. Texts are cut at 256 tokens. Systems run"
                " in turn, those whose turn it is not are stopped; loading is not measured. A ratio is that of the"
                " medians, and in brackets its least and greatest when the rounds are taken one by one. Peers come from"
                " `benchmarks/setup_embeddings.sh`; each was tried in several settings, and the fastest measured.",
                rates_table(results),
                "Against the better peer:",
                best_peer_table(results),
                "Greatest difference of a component from sentence-transformers' vectors, and least cosine:",
                agreement_table(results),
                *body_lists(results, ready, fits),
            ]
        )
        + "\n"
    )


def body_lists(results: Sequence[Result], ready: Mapping[str, Sequence[Ready]], fits: Sequence[Fit]) -> list[str]:
    """Workloads, settings and fitted costs, as lists."""
    workloads = {result.workload.name: (result.workload.description, result.tokens) for result in results}
    lists = [
        "\n".join(f"- {name}: {text}, {tokens:,} tokens" for name, (text, tokens) in workloads.items()),
        "\n".join(
            f"- {TITLES[name]} {about['version']}: {about['settings']}"
            for name, all_ in ready.items()
            for about in all_
        ),
    ]
    if fits:
        lists.append("Cost of a padded batch of the real encoder, batches of 1 to 32 texts of 8 to 256 tokens:")
        lists.append("\n".join(f"- {each.line}" for each in fits))
    return lists


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"


def _difference(difference: tuple[float, float]) -> str:
    greatest, cosine = difference
    return f"{greatest:.1e}, {cosine:.6f}"
