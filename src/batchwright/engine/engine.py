"""`Engine`: a model, its KV cache and its scheduler, for synchronous callers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from batchwright.clock import Clock, MonotonicClock
from batchwright.engine.bodies import ModelBody, load_body
from batchwright.engine.bodies.load import choose_device
from batchwright.engine.continuations import Scoring, TextOrTokens
from batchwright.engine.core import EngineCore
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.grammars import Grammars
from batchwright.engine.machine_rates import kept_rates
from batchwright.engine.prompts import as_requests, refused
from batchwright.engine.scoring import PromptScores, most_scored
from batchwright.engine.step.multi_step import MOST_STEPS
from batchwright.engine.tensor_parallel.parallel_body import ParallelBody
from batchwright.engine.tokenizer import Tokenizer
from batchwright.engine_config import EngineConfig
from batchwright.errors import EngineClosed, InvalidRequest, UnsupportedModel
from batchwright.kept_costs import EngineFacts, KeptCosts, keep_costs
from batchwright.models import DEFAULT_MODEL, require_generating, resolve, served_name
from batchwright.planning.bound import MachineRates
from batchwright.planning.needed_work import Answered, least_seconds
from batchwright.request import InferenceRequest, InferenceResponse, Prompt, SamplingParams, Score, StreamEvent
from batchwright.scheduling import Scheduler
from batchwright.scheduling.sizes import BLOCK_SIZE, EngineSizes


class Engine:
    """Continuous batching over one model.

    `model` is a built-in name, a folder in transformers format, a GGUF file or a hub id. `config` says how to compute;
    `options` are fields of `EngineConfig` that override it, as in `Engine("smollm2", max_num_seqs=64)`. `forms`
    announces requests for answers of a given form: what these need is then read while the weights are packed.

    Raises `ModelNotFound`, `UnsupportedModel` or `DownloadError` for the model, ValueError for a setting.
    Not thread-safe: use `AsyncEngine` from several threads.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        forms: bool = False,
        **options: Any,
    ) -> None:
        config = (config or EngineConfig()).with_options(**options)
        require_generating(str(model))
        on_cpu = choose_device(config.device).type == "cpu"
        folder = resolve(str(model), weights=config.weights_form(on_cpu=on_cpu))
        self.model_name = served_name(str(model))
        loaded = load_body(folder, config) if config.tensor_parallel == 1 else ParallelBody(folder, config)
        try:
            self.facts = _facts(loaded, config.attention)
            """What depends only on the model and this machine."""
            self._core: EngineCore | None = _core(
                loaded, config, clock or MonotonicClock(), folder, self.facts, forms=forms
            )
        except BaseException:
            loaded.close()
            raise
        self._stats = self._core.stats
        self._config, self._record = config, self._core.scheduler.record
        self._rates: MachineRates | None = None
        """Rates of this machine with this body, once they are known."""
        self._unclaimed: list[InferenceResponse] = []
        """Responses to requests from `submit` that ended while `generate` or `stream` were stepping."""
        self._inboxes: dict[str, deque[StreamEvent]] = {}
        """Queues for the events of requests that a `generate` or `stream` waits for, whoever steps or cancels them."""
        self._cancelled: list[StreamEvent] | None = None
        """Last events of requests cancelled by callbacks during a step, to follow the step's; None between steps."""

    @property
    def core(self) -> EngineCore:
        """The token-level loop. Raises `EngineClosed` after `close`."""
        if self._core is None:
            raise EngineClosed("the engine is closed: make a new one")
        return self._core

    @property
    def config(self) -> EngineConfig:
        """How the engine computes, options included."""
        return self._config

    @property
    def stats(self) -> EngineStats:
        """Statistics since the engine was created; also available after `close`."""
        return self._stats

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self.core.max_model_len

    @property
    def unfinished(self) -> int:
        """Number of requests that were submitted and have not ended."""
        return self.core.unfinished

    @property
    def wants(self) -> int:
        """Number of further requests to submit to keep the batch full."""
        return max(0, 2 * self.core.scheduler.max_num_seqs - self.core.unfinished_sequences)

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request for `step`. Raises `InvalidRequest` for one that can never be computed."""
        self.core.add(request)

    def step(self, most: int = 1) -> list[InferenceResponse]:
        """Compute one step; return the responses to requests from `submit` that have ended since the last call.

        Responses of failed requests have `error` set. Up to `most` steps are computed if the following ones are known
        to be alike, which saves time between steps.
        """
        self._advance(most, expects_successors=True)
        responses, self._unclaimed = self._unclaimed, []
        return responses

    def cancel(self, request_id: str) -> InferenceResponse | None:
        """End a request at once; return its response so far, or None if there is no such request."""
        event = self.core.cancel(request_id)
        if event is not None and request_id in self._inboxes:
            if self._cancelled is None:
                self._sort([event])
            else:
                self._cancelled.append(event)
        return None if event is None else event.response

    def _advance(self, most: int, *, expects_successors: bool = False) -> None:
        """Compute up to `most` steps, and pass their events to whoever waits for them."""
        core, events = self.core, list[StreamEvent]()
        around, self._cancelled = self._cancelled, []
        try:
            events = core.step(most, expects_successors=expects_successors)
        except BaseException:  # an interrupt: requests that had ended have their responses all the same
            events = core.take_events()
            raise
        finally:
            cancelled, self._cancelled = self._cancelled, around
            self._sort([*events, *cancelled])

    def _sort(self, events: Iterable[StreamEvent]) -> None:
        """Pass events to whoever waits for them."""
        for event in events:
            if (inbox := self._inboxes.get(event.request_id)) is not None:
                inbox.append(event)
                if event.response is not None:
                    del self._inboxes[event.request_id]
            elif event.response is not None:
                self._unclaimed.append(event.response)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[InferenceRequest],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[InferenceResponse]:
        """Compute `prompts` and return their responses in the same order. `progress` shows a bar on standard error.

        `prompts` is one prompt or several, each of them text, token ids or chat messages; or requests, which have their
        own parameters. `sampling_params` is one for all prompts or one for each. If a request fails or is refused, the
        `error` of its response is set and the others are not affected. Raises ValueError for arguments of other types,
        or if the numbers do not match.
        """
        requests = as_requests(prompts, sampling_params)
        events = self._events(requests, stream=False)
        responses = {}
        with _bar(len(requests), progress) as advance:
            for event in events:
                if event.response is not None:
                    responses[event.request_id] = event.response
                    advance()
        return [responses[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[InferenceRequest],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Compute `prompts` and yield text as it is generated; the last event of each prompt carries its response.

        The arguments are those of `generate`. Leaving the iterator early cancels what is unfinished.
        """
        return self._events(as_requests(prompts, sampling_params), stream=True)

    def _events(
        self,
        requests: Sequence[InferenceRequest | InferenceResponse],
        *,
        stream: bool,
        scores: Mapping[str, PromptScores] | None = None,
    ) -> Iterator[StreamEvent]:
        """Submit `requests` and step until all have ended, or cancel the rest when the iterator is left early.

        `scores` maps the ids of requests to where the scores of their prompts go, if not into the responses alone.
        Responses to requests from `submit` are kept for `step`.
        """
        core, waiting, inbox = self.core, set[str](), deque[StreamEvent]()
        try:
            for request in requests:
                if isinstance(request, InferenceResponse):
                    yield StreamEvent(request.request_id, 0, "", (), "error", request)
                    continue
                try:
                    core.add(request, stream=stream, scores=(scores or {}).get(request.request_id))
                    waiting.add(request.request_id)
                    self._inboxes[request.request_id] = inbox
                except InvalidRequest as error:
                    yield StreamEvent(request.request_id, 0, "", (), "error", refused(request, error))
            while waiting:
                if not inbox:
                    self._advance(MOST_STEPS)
                while inbox:
                    event = inbox.popleft()
                    if event.response is not None:
                        waiting.discard(event.request_id)
                    yield event
        finally:
            for request_id in waiting:
                if self._inboxes.get(request_id) is inbox:
                    del self._inboxes[request_id]
                    core.cancel(request_id)

    def score(
        self,
        contexts: TextOrTokens | Sequence[TextOrTokens],
        continuations: Sequence[TextOrTokens],
        *,
        progress: bool = False,
    ) -> list[Score]:
        """Return the log-likelihood of each of `continuations` after its context, in the same order.

        Contexts and continuations are either both texts or both token ids; one text or one list of ids as `contexts` is
        the context of all. Common beginnings of prompts are computed once, whatever their order. If one cannot be
        computed, the `error` of its score is set and the others are not affected. Raises ValueError if the numbers do
        not match.
        """
        scoring = Scoring(contexts, continuations, self.core.tokenizer)
        with _bar(scoring.wanted, progress) as advance:
            for event in self._events(scoring.requests, stream=False, scores=scoring.prompt_scores):
                if event.response is not None:
                    for _ in range(scoring.answered(event.request_id, event.response.error)):
                        advance()
        return scoring.scores()

    def keep_costs(self, *, is_run: bool = True) -> KeptCosts | None:
        """Save the measured costs of its steps, for later forecasts; return all that are saved for its model, if any.

        May be called after `close`. Each step is saved once. `is_run`: whether the steps were those of a run, which is
        compared with its prediction.
        """
        kept = keep_costs(self.model_name, self._config, self.facts, self._record, is_run=is_run)
        self._record.clear()
        return kept

    def least_seconds(self, answered: Answered) -> float | None:
        """Return the least time in which this machine computes what was answered. Thread-safe.

        None if nothing was generated, no run has measured the rates of this machine with this model yet, or the engine
        is closed. Rates that have not settled were measured beside other work: the machine could be faster by itself.
        """
        if (core := self._core) is None or not answered.generated_tokens or (model := core.body.costs) is None:
            return None
        if self._rates is None or not self._rates.settled:
            self._rates = kept_rates(core.body)
        return None if self._rates is None else least_seconds(model, self._rates, answered)

    def close(self) -> None:
        """Free the model and its caches; end unfinished requests with `EngineClosed`. May be called repeatedly."""
        if self._core is not None:
            self._core.close()
            self._core.body.close()
            self._core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _core(
    body: ModelBody, config: EngineConfig, clock: Clock, folder: Path, facts: EngineFacts, *, forms: bool
) -> EngineCore:
    """Return the loop over `body`, whose KV cache is allocated here."""
    sizes = facts.sizes(config)
    # Reading the tokenizer takes half as long as packing the weights, and is done at the same time.
    beside = ThreadPoolExecutor(1, thread_name_prefix="batchwright-tokenizer")
    try:
        reading = beside.submit(_grammars, folder, body.vocab_size, sizes.max_model_len)
        if forms:
            beside.submit(lambda: reading.result().read())
        scheduler = _allocated(body, config, sizes)
        grammars = reading.result()
    finally:
        beside.shutdown(wait=False)
    return EngineCore(body, grammars.tokenizer, scheduler, clock, max_model_len=sizes.max_model_len, grammars=grammars)


def _grammars(folder: Path, width: int, context: int) -> Grammars:
    return Grammars(Tokenizer(folder, width, context=context), width)


def _allocated(body: ModelBody, config: EngineConfig, sizes: EngineSizes) -> Scheduler:
    """Allocate the KV cache of `body`, make it ready to compute, and return the scheduler over its blocks."""
    body.allocate(sizes.num_blocks, BLOCK_SIZE, config.attention)
    max_scored = most_scored(body.vocab_size, sizes.max_batch_tokens)
    logit_rows = sizes.max_num_seqs + max_scored
    if config.deterministic and (reason := body.why_not_deterministic(sizes.max_batch_tokens, logit_rows)) is not None:
        raise UnsupportedModel(f"deterministic=True is not possible: {reason}")
    body.prepare(sizes.max_num_seqs)
    draft_rows = body.free_rows if config.drafting else 0
    return sizes.scheduler(config, draft_rows=draft_rows, max_scored=max_scored)


def _facts(body: ModelBody, attention: str) -> EngineFacts:
    """Return what is known of `body` before its KV cache is allocated."""
    return EngineFacts(
        device=body.device.type,
        block_bytes=sum(layer.bytes_per_block for layer in body.kv_shapes(1, BLOCK_SIZE, attention)),
        free_bytes=body.free_memory(),
        max_model_len=body.max_model_len,
    )


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[], object]]:
    """Yield a function to call for each of `total` answers; it advances a bar if one is `shown`."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda: bar.advance(task)
