"""`WorkMeter`: what the steps of an engine computed and how fast, and what its answers needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from batchwright.engine.bodies.body import KernelSeconds, StepOutput
from batchwright.engine.generation import RequestState
from batchwright.engine.step.batch import StepBatch
from batchwright.planning.bound import MachineRates, ModelCosts, SpentTime, Work
from batchwright.planning.needed_work import NeededWork
from batchwright.scheduling import StepPlan


class WorkMeter:
    """Measures the steps of one core while it is the core's `meter`.

    No rate is slower than the best that a step reached: whatever was wrong with `rates`, a bound of needed work at
    these is less than the time that the steps took, since they did at least that work.
    """

    def __init__(self, model: ModelCosts, seconds: KernelSeconds, rates: MachineRates, block_size: int) -> None:
        self.model = model
        self.needed = NeededWork(model, block_size)
        self.computed_work = Work()
        self.spent = SpentTime()
        self.steps = 0
        self._seconds = seconds
        self._counted = seconds.products, seconds.attention
        self._block_size = block_size
        self._rates = rates
        self.lasting_rates = rates
        """The best rates so far that hold for other work, too."""

    @property
    def rates(self) -> MachineRates:
        """The best rates so far. All steps together may have read keys faster than memory: some are in the caches."""
        best = self.lasting_rates
        if not self.spent.attention:
            return best
        read = self.computed_work.read_bytes(self.model)
        return replace(best, bandwidth=max(best.bandwidth, read / self.spent.attention))

    def computed(
        self, plan: StepPlan, batch: StepBatch, output: StepOutput, forward: float, *, nothing_left: bool
    ) -> None:
        """Count a step of which the model took `forward` seconds; `nothing_left`: no sequence waited for a place."""
        products, attention = self._since()
        work = self._work(plan, batch, output)
        self.steps += 1
        self.computed_work.add(work)
        spent = self.spent
        spent.forward += forward
        spent.products += products
        spent.attention += attention
        if nothing_left:
            spent.tail_products += products
            spent.tail.add(work)
        self.lasting_rates = self.lasting_rates.with_best(self._reached(work, products, attention))

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
        """Return the seconds of products and attention since the last call."""
        now = self._seconds.products, self._seconds.attention
        before, self._counted = self._counted, now
        return now[0] - before[0], now[1] - before[1]

    def _work(self, plan: StepPlan, batch: StepBatch, output: StepOutput) -> Work:
        likeliest, pairs, answer_keys = len(output.likeliest), 0, 0
        decodes, known = [], []
        for place, chunk in enumerate(plan.chunks):
            pairs += self.model.pairs(chunk.start, chunk.start + chunk.count + len(chunk.drafts))
            if chunk.is_decode:
                decodes.append(place)
                known.append(min(chunk.start, chunk.sequence.num_prompt))
                answer_keys += chunk.start + chunk.count - known[-1]
        return Work(
            rows=batch.num_tokens,
            logit_rows=batch.logit_rows.shape[0] - likeliest,
            likeliest_rows=likeliest,
            pairs=pairs,
            lone_prompt_keys=self._lone_keys(batch.tables[decodes], np.array(known)) if decodes else 0,
            lone_answer_keys=answer_keys,
        )

    def _lone_keys(self, tables: np.ndarray, known: np.ndarray) -> int:
        """Return how many of the first `known` [D] keys of decodes with block `tables` [D, most] no other one reads."""
        blocks = tables[np.arange(tables.shape[1]) < (known // self._block_size)[:, None]]
        alone = int((np.bincount(blocks)[blocks] == 1).sum()) if len(blocks) else 0
        return alone * self._block_size + int((known % self._block_size).sum())

    def _reached(self, work: Work, products: float, attention: float) -> MachineRates:
        """Return the rates of a step."""
        rates, model = self._rates, self.model
        attended = work.attention_operations(model, rates.lone_cost)
        return replace(
            rates,
            products=work.product_operations(model) / products if products > 0.0 else rates.products,
            attention=attended / attention if attention > 0.0 else rates.attention,
            least_step=products,
        )
