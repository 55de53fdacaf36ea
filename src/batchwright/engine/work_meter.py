"""`WorkMeter`: the work that the steps of an engine computed, their speed, and the work that its answers needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchwright.engine.bodies.body import KernelSeconds, StepOutput
from batchwright.engine.generation import RequestState
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.step.multi_step import DecodedStep
from batchwright.planning.bound import MachineRates, ModelCosts, SpentTime, Work
from batchwright.planning.needed_work import NeededWork
from batchwright.scheduling import Chunk, StepPlan, repeated

_TOGETHER = 32
"""Steps that are counted at once: code that runs once per step finds nothing that it needs in the caches, since all
weights have gone through them in between."""


@dataclass(slots=True)
class _Step:
    """A step that is not counted yet, and its time in seconds."""

    chunks: list[Chunk]
    tables: np.ndarray
    rows: int
    logit_rows: int
    likeliest_rows: int
    nothing_left: bool
    forward: float
    products: float
    attention: float


class WorkMeter:
    """Measures the steps of one core while it is the core's `meter`.

    No rate is slower than the best that a step reached: even if the initial `rates` were wrong, a bound of needed work
    at the resulting rates is less than the time that the steps took, since they did at least that work.
    """

    def __init__(self, model: ModelCosts, seconds: KernelSeconds, rates: MachineRates, block_size: int) -> None:
        self.model = model
        self.needed = NeededWork(model, block_size)
        self._computed_work = Work()
        self._spent = SpentTime()
        self._steps = 0
        self._seconds = seconds
        self._counted = seconds.products, seconds.attention
        self._block_size = block_size
        self._rates = self._lasting_rates = rates
        self._uncounted: list[_Step] = []

    @property
    def steps(self) -> int:
        """Number of steps that were measured."""
        return self._steps + len(self._uncounted)

    @property
    def computed_work(self) -> Work:
        """The work of all steps."""
        self._count()
        return self._computed_work

    @property
    def spent(self) -> SpentTime:
        """What the time of all steps was spent on; the caller sets `total`."""
        self._count()
        return self._spent

    @property
    def lasting_rates(self) -> MachineRates:
        """The best rates so far that also hold for other work."""
        self._count()
        return self._lasting_rates

    @property
    def rates(self) -> MachineRates:
        """The best rates so far. All steps together may have read keys faster than from memory: some are in caches."""
        best = self.lasting_rates
        if not self._spent.attention:
            return best
        read = self._computed_work.read_bytes(self.model)
        return replace(best, bandwidth=max(best.bandwidth, read / self._spent.attention))

    def computed(
        self, plan: StepPlan, batch: StepBatch, output: StepOutput, forward: float, *, nothing_left: bool
    ) -> None:
        """Measure a step in which the model took `forward` seconds; `nothing_left`: no sequence waited for a slot."""
        products, attention = self._since()
        likeliest = len(output.likeliest)
        logits = batch.logit_rows.shape[0] - likeliest
        self._uncounted.append(
            _Step(
                plan.chunks,
                batch.tables,
                batch.num_tokens,
                logits,
                likeliest,
                nothing_left,
                forward,
                products,
                attention,
            )
        )

    def computed_several(
        self, plan: StepPlan, tables: np.ndarray, steps: Sequence[DecodedStep], *, nothing_left: bool
    ) -> None:
        """Measure steps, of which the first is `plan` and the others repeat it; `tables` are as in a batch."""
        self._since()
        rows = len(plan.chunks)
        for step in steps:
            self._uncounted.append(
                _Step(
                    plan.chunks,
                    tables,
                    rows,
                    rows - step.likeliest,
                    step.likeliest,
                    nothing_left,
                    step.model,
                    step.products,
                    step.attention,
                )
            )
            plan = repeated(plan)

    def between_steps(self) -> None:
        """Count steps if there are enough of them, while no step is being timed."""
        if len(self._uncounted) >= _TOGETHER:
            self._count()

    def _count(self) -> None:
        """Count the steps that are not counted yet."""
        spent = self._spent
        for step in self._uncounted:
            work = self._work(step)
            self._steps += 1
            self._computed_work.add(work)
            spent.forward += step.forward
            spent.products += step.products
            spent.attention += step.attention
            if step.nothing_left:
                spent.tail_products += step.products
                spent.tail.add(work)
            self._lasting_rates = self._lasting_rates.with_best(self._reached(work, step))
        self._uncounted.clear()

    def answered(self, state: RequestState) -> None:
        """Count what the completions of an answered request needed."""
        for generation in state.generations:
            sequence = generation.sequence
            scores = state.scores if generation.index == 0 else None
            self.needed.add(
                sequence.tokens[: generation.known],
                prompt=sequence.num_prompt,
                chain=generation.chain,
                turns=generation.turns,
                chosen=sequence.num_generated - generation.forced_tokens,
                likeliest=generation.sampling.takes_likeliest,
                scored=range(0) if scores is None else scores.rows,
            )

    def _since(self) -> tuple[float, float]:
        """Return the seconds spent on products and on attention since the last call."""
        now = self._seconds.products, self._seconds.attention
        before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1]

    def _work(self, step: _Step) -> Work:
        pairs, answer_keys = 0, 0
        decodes, known = [], []
        for place, chunk in enumerate(step.chunks):
            pairs += self.model.pairs(chunk.start, chunk.start + chunk.count + len(chunk.drafts))
            if chunk.is_decode:
                decodes.append(place)
                known.append(min(chunk.start, chunk.sequence.num_prompt))
                answer_keys += chunk.start + chunk.count - known[-1]
        return Work(
            rows=step.rows,
            logit_rows=step.logit_rows,
            likeliest_rows=step.likeliest_rows,
            pairs=pairs,
            unshared_prompt_keys=self._unshared_keys(step.tables[decodes], np.array(known)) if decodes else 0,
            unshared_answer_keys=answer_keys,
        )

    def _unshared_keys(self, tables: np.ndarray, known: np.ndarray) -> int:
        """Return how many of the first `known` [D] keys of decodes with block `tables` [D, most] are not shared."""
        blocks = tables[np.arange(tables.shape[1]) < (known // self._block_size)[:, None]]
        alone = int((np.bincount(blocks)[blocks] == 1).sum()) if len(blocks) else 0
        return alone * self._block_size + int((known % self._block_size).sum())

    def _reached(self, work: Work, step: _Step) -> MachineRates:
        """Return the rates of a step."""
        rates, model, products, attention = self._rates, self.model, step.products, step.attention
        attended = work.attention_operations(model, rates.unshared_cost)
        return replace(
            rates,
            products=work.product_operations(model) / products if products > 0.0 else rates.products,
            attention=attended / attention if attention > 0.0 else rates.attention,
            least_step=products,
        )
