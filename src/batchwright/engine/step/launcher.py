"""The launch of a step, and the tokens that result from it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, islice

import torch

from batchwright.clock import Clock
from batchwright.engine.bodies import ModelBody
from batchwright.engine.bodies.body import StepOutput
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.generation import Generation
from batchwright.engine.grammars import MaskMaker, Masks
from batchwright.engine.sampling import Sampled, SamplingState, hold_ends, sample
from batchwright.engine.scoring import score_rows, without_scored
from batchwright.engine.step.batch import RowMasks, StepBatch, build_batch
from batchwright.engine.step.launched import LaunchedStep
from batchwright.engine.step.multi_step import MOST_SECONDS, DecodedStep, DecodeRun, Interruption
from batchwright.engine.step.pending_tokens import choose_without_waiting
from batchwright.engine.work_meter import WorkMeter
from batchwright.scheduling import Chunk, Scheduler, StepPlan


class StepLauncher:
    """Launcher of the steps that `scheduler` plans: computes them with `body`, and has their tokens chosen."""

    def __init__(
        self,
        body: ModelBody,
        scheduler: Scheduler,
        generations: Mapping[int, Generation],
        clock: Clock,
        stats: EngineStats,
    ) -> None:
        """`generations` holds the unfinished generations at any time, by the ordinals of their sequences."""
        self._body, self._scheduler, self._generations = body, scheduler, generations
        self._clock, self._stats = clock, stats
        self._masks = MaskMaker(body.vocab_size)
        self.runs_ahead = body.returns_early and not scheduler.draft_rows
        """Whether a step may be launched while the device is still computing the one before."""
        self.masks_late = body.returns_early
        """Whether masks are made after a step was launched, while the device computes it."""

    def launch(
        self, plan: StepPlan, began: float, meter: WorkMeter | None, before: LaunchedStep | None = None
    ) -> LaunchedStep:
        """Begin to compute a step that was planned at `began`; a GPU goes on by itself.

        `before` is the step whose tokens may not be known yet. `meter` is notified of what was computed.

        Scores of prompts are recorded immediately, which does no harm if the step is computed again.
        """
        batch = build_batch(plan.chunks, self._scheduler.blocks.block_size, self._body.device)
        if before is not None:
            before.fill_in(batch, plan.chunks)
        computing_since = self._clock.now()
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        states = [
            self._generations[chunk.sequence.ordinal].sampling
            for chunk in sampled
            for _ in range(1 + len(chunk.drafts))
        ]
        masks = None
        if not self.masks_late:
            masks = self._masks_for(sampled, states)
            if masks is not None and not plan.num_scored:
                batch.masks = RowMasks.of([state.matcher is not None for state in states], masks)
        forward_began = self._clock.now()
        if plan.num_scored:
            output = self._output_with_scores(plan, batch)
        else:
            output = self._body.output(batch, [state.takes_likeliest for state in states])
        if meter is not None:
            meter.computed(
                plan, batch, output, self._clock.now() - forward_began, nothing_left=self._scheduler.has_free_place
            )
        pending = None
        if self.runs_ahead and not output.likeliest and len(states) == len(sampled):
            unknown = set() if before is None else {sequence.ordinal for sequence, _ in before.unknown}
            follows = [chunk.sequence.ordinal in unknown for chunk in sampled]
            pending = choose_without_waiting(output.logits, states, follows)
        for chunk in plan.chunks:
            owner = self._generations[chunk.sequence.ordinal].owner
            if owner.first_step_at is None:
                owner.first_step_at = began
        kept = output if pending is None else None
        return LaunchedStep(plan, sampled, states, kept, masks, pending, began, computing_since)

    def compute_several(
        self, plan: StepPlan, began: float, most: int, interruption: Interruption, meter: WorkMeter | None
    ) -> list[DecodedStep]:
        """Compute the step that was planned at `began` and those after it, up to `most`, if they are known to be alike.

        If that would be only one step, nothing is computed or returned.
        """
        if most == 1 or not self._body.has_multi_step:
            return []
        generations = [self._generations[chunk.sequence.ordinal] for chunk in plan.chunks]
        if any(each.needs_host for each in generations):
            return []
        most = self._scheduler.reserve_steady_steps(plan, most)
        if most == 1:
            return []
        batch = build_batch(plan.chunks, self._scheduler.blocks.block_size, self._body.device)
        states, ends = [each.sampling for each in generations], [each.ends for each in generations]
        seconds = min(MOST_SECONDS, self._scheduler.next_event() - began)
        steps = self._body.multi_step(batch, DecodeRun.of(most, seconds, states, ends), interruption)
        if meter is not None:
            meter.computed_several(plan, batch.tables, steps, nothing_left=self._scheduler.has_free_place)
        return steps

    def outcomes(self, step: LaunchedStep, following: LaunchedStep | None) -> list[list[Sampled]]:
        """Wait for the tokens that follow each sampled chunk of `step` and each of its drafts.

        What `following`, which was launched ahead, computed with a different token is discarded.
        """
        if step.pending is not None:
            tokens, undecided = step.pending.wait()
            if undecided and following is not None:
                following.discard({step.sampled[row].sequence.ordinal for row in undecided})
            return [[Sampled(token)] for token in tokens]
        masks, output = step.masks, step.output
        if output is None:
            raise RuntimeError("a step has neither logits nor tokens")
        if self.masks_late:
            # The device is still computing, which hides the time for making masks.
            masks = self._masks_for(step.sampled, step.states)
        outcomes = iter(sample(output.logits, step.states, output.likeliest, masks) if step.sampled else [])
        if not step.sampled and output.logits.is_cuda:
            # Nothing has waited for the device: this step would seem to take no time, and the next one the time of
            # both.
            torch.cuda.synchronize(output.logits.device)
        return [list(islice(outcomes, 1 + len(chunk.drafts))) for chunk in step.sampled]

    def _masks_for(self, sampled: list[Chunk], states: list[SamplingState]) -> Masks | None:
        """Return the masks of the rows whose sequences have a grammar, None if there are none."""
        firsts = accumulate((1 + len(chunk.drafts) for chunk in sampled), initial=0)
        # Taken from the states: a step that was launched ahead may have sequences that have ended since.
        rows = [(states[first].matcher, chunk.drafts) for first, chunk in zip(firsts, sampled, strict=False)]
        constrained = [(matcher, drafts) for matcher, drafts in rows if matcher is not None]
        if not constrained:
            return None
        began = self._clock.now()
        masks = self._masks.masks(constrained)
        hold_ends(states, masks)
        self._stats.mask_seconds += self._clock.now() - began
        self._stats.masks += len(masks)
        return masks

    def _output_with_scores(self, plan: StepPlan, batch: StepBatch) -> StepOutput:
        """Compute a step, record the scores of its prompts, and return the output of the other rows."""
        greedy: list[bool] = []
        is_scored: list[bool] = []
        for chunk in plan.chunks:
            others = 1 + len(chunk.drafts) if chunk.samples else 0
            sampling = self._generations[chunk.sequence.ordinal].sampling
            likeliest = sampling.takes_likeliest and sampling.matcher is None
            greedy += [False] * len(chunk.scored) + [likeliest] * others
            is_scored += [True] * len(chunk.scored) + [False] * others
        output = self._body.output(batch, greedy)
        rows, rest = without_scored(output, is_scored)
        owners = [
            (scores, position, scores.wanted(position))
            for chunk in plan.chunks
            if (scores := self._generations[chunk.sequence.ordinal].owner.scores) is not None
            for position in chunk.scored
        ]
        repeated = [row for row, (*_, wanted) in zip(rows, owners, strict=True) for _ in wanted]
        found = iter(score_rows(output.logits, repeated, [each for *_, wanted in owners for each in wanted]))
        for scores, position, wanted in owners:
            scores.record(position, list(islice(found, len(wanted))))
        return rest
