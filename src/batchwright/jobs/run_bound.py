"""The bound of a run: how fast this machine could have computed it at best, and where the additional time went."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from batchwright.clock import Clock
from batchwright.errors import BatchwrightError
from batchwright.models.cache import Progress
from batchwright.planning.bound import Bound, MachineRates, NoBound, Shares, bound_of, shares_of

if TYPE_CHECKING:
    from batchwright.engine.engine import Engine
    from batchwright.engine.work_meter import WorkMeter

_LEAST_LINES = 64
"""Least number of lines of a run for the machine's rates to be measured first, which takes a few seconds."""


class RunBound:
    """Measures one run of an engine that computes nothing else, from `begin` to `end`."""

    def __init__(self, engine: Engine, meter: WorkMeter, known: MachineRates | None) -> None:
        """`known`: the rates that are stored when it begins."""
        self._engine = engine
        self._meter = meter
        self._known = known

    @classmethod
    def begin(cls, engine: Engine, lines: int, progress: Progress, clock: Clock) -> RunBound:
        """Begin to measure `engine`. `progress` is notified of steps that take a while.

        Raises `NoBound` if no bound could be given: if the times of its model's kernels are not known, for a run of few
        `lines` on a machine whose rates were not measured before, if they cannot be measured, and for an engine that
        has already computed something, since what it has cached costs the run nothing.
        """
        from batchwright.engine.machine_rates import kept_rates, machine_rates
        from batchwright.engine.work_meter import WorkMeter

        core = engine.core
        body = core.body
        if (model := body.costs) is None:
            raise NoBound("the model's layers are not compiled")
        if core.stats.steps or core.unfinished:
            raise NoBound("the engine had computed something before, of which its cache may hold a part")
        blocks = core.scheduler.blocks
        if lines < _LEAST_LINES:
            if (kept := kept_rates(body)) is None:
                raise NoBound(
                    f"the rates of this machine are measured before the first run of {_LEAST_LINES} lines or more, "
                    "which there was none of"
                )
            rates = kept
        else:
            rates = machine_rates(body, blocks.block_size, blocks.num_blocks, progress, clock)
        # While they are watched, steps take a little longer.
        if (seconds := body.watch()) is None:
            raise NoBound("the times of the model's products and attention cannot be told apart here")
        core.meter = WorkMeter(model, seconds, rates, blocks.block_size)
        return cls(engine, core.meter, kept_rates(body))

    def end(self) -> None:
        """Stop measuring, and store rates that were better than those known before."""
        from batchwright.engine.machine_rates import keep_rates, kept_rates

        with suppress(BatchwrightError):  # it may be closed
            core = self._engine.core
            core.meter = None
            # What another process has measured meanwhile must not be mixed with what this run began with.
            if kept_rates(core.body) == self._known:
                keep_rates(self._meter.lasting_rates, core.body)

    def figures(self, loop_seconds: float) -> dict[str, Any]:
        """Fields of the report of a run that took `loop_seconds`. Raises `NoBound` if it computed nothing."""
        meter = self._meter
        needed, stats = meter.needed.work, self._engine.stats
        if not meter.steps or not needed.rows or loop_seconds <= 0:
            raise NoBound("nothing was computed")
        bound = bound_of(
            needed,
            meter.needed.steps,
            meter.model,
            meter.rates,
            places=stats.max_num_seqs,
            block_size=stats.block_size,
            drafts=stats.accepted_tokens > 0,
            sampled=meter.needed.sampled,
        )
        meter.spent.total = loop_seconds
        shares = shares_of(bound, meter.spent, needed, meter.computed_work, meter.model, meter.rates)
        return {
            "bound_seconds": bound.seconds,
            "share_of_bound": bound.seconds / loop_seconds,
            "bound": _details(bound, shares, self._meter),
        }


def _details(bound: Bound, shares: Shares, meter: WorkMeter) -> Mapping[str, Any]:
    """Everything needed to compute the bound again."""
    return {
        "seconds": bound.seconds,
        **asdict(bound),
        "steps": meter.steps,
        "time": dict(shares.spent),
        "lost": dict(shares.lost),
        "rates": asdict(meter.rates),
        "model": asdict(meter.model),
        "needed": asdict(meter.needed.work),
        "computed": asdict(meter.computed_work),
        "needed_steps": asdict(meter.needed.steps),
    }
