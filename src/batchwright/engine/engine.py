"""`Engine`: a model, its KV cache and its scheduler, for callers that are not asynchronous."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batchwright.clock import Clock, MonotonicClock
from batchwright.engine.bodies import load_body
from batchwright.engine.core import EngineCore
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.kv_memory import num_kv_blocks
from batchwright.engine.prompts import as_requests, refused
from batchwright.engine.tokenizer import Tokenizer
from batchwright.engine_config import EngineConfig
from batchwright.errors import EngineClosed, InvalidRequest, UnsupportedModel
from batchwright.kv import BlockManager
from batchwright.models import BUILTIN, DEFAULT_MODEL, Kind, resolve
from batchwright.request import InferenceRequest, InferenceResponse, Prompt, SamplingParams, StreamEvent
from batchwright.scheduling import Scheduler, SloController

BLOCK_SIZE = 16
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_NUM_SEQS = 256


class Engine:
    """Continuous batching over one model.

    `model` is a built-in name, a folder in transformers format, a GGUF file or a hub id. `config` says how to compute;
    `options` are fields of `EngineConfig` that go before it, as in `Engine("smollm2", max_num_seqs=64)`.

    Raises `ModelNotFound`, `UnsupportedModel` or `DownloadError` for the model, ValueError for a setting.
    Not safe for use from several threads: that is what `AsyncEngine` is for.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        config = (config or EngineConfig()).with_options(**options)
        _require_generating(str(model))
        folder = resolve(str(model))
        self.model_name = str(model)
        loaded = load_body(folder, config)
        length = loaded.max_model_len if config.max_model_len is None else config.max_model_len
        if length > loaded.max_model_len:
            raise ValueError(f"max_model_len={length}: this model takes {loaded.max_model_len} tokens at most")
        num_seqs = config.max_num_seqs or _NUM_SEQS
        batch_tokens = config.max_batch_tokens or _BATCH_TOKENS.get(loaded.device.type, 512)
        most_blocks = num_seqs * -(-length // BLOCK_SIZE)
        num_blocks = num_kv_blocks(loaded.kv_shapes(1, BLOCK_SIZE, config.attention), config.kv_memory, most_blocks)
        loaded.allocate(num_blocks, BLOCK_SIZE, config.attention)
        if config.deterministic and (reason := loaded.why_not_deterministic(batch_tokens, num_seqs)) is not None:
            raise UnsupportedModel(f"deterministic=True is not possible: {reason}")
        scheduler = Scheduler(
            BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=config.prefix_caching),
            max_batch_tokens=batch_tokens,
            max_num_seqs=num_seqs,
            promote_after=config.promote_after,
            batch_share=config.batch_share,
            draft_rows=loaded.free_rows if config.drafting else 0,
            slo=SloController(ttft=_seconds(config.ttft_ms), tpot=_seconds(config.tpot_ms)),
        )
        self._core: EngineCore | None = EngineCore(
            loaded,
            Tokenizer(folder, loaded.vocab_size, context=length),
            scheduler,
            clock or MonotonicClock(),
            max_model_len=length,
        )
        self._stats = self._core.stats
        self._unclaimed: list[InferenceResponse] = []
        """Of requests from `submit` that ended while `generate` or `stream` were stepping."""

    @property
    def core(self) -> EngineCore:
        """The loop itself. Raises `EngineClosed` after `close`."""
        if self._core is None:
            raise EngineClosed("the engine is closed: make a new one")
        return self._core

    @property
    def stats(self) -> EngineStats:
        """Figures since the engine was made; still there after `close`."""
        return self._stats

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self.core.max_model_len

    @property
    def unfinished(self) -> int:
        """Requests submitted and not ended."""
        return self.core.unfinished

    @property
    def wants(self) -> int:
        """How many more requests to submit so that no place in the batch stays empty for want of them."""
        return max(0, 2 * self.core.scheduler.max_num_seqs - self.core.unfinished_sequences)

    def submit(self, request: InferenceRequest) -> None:
        """Queue a request for `step`. Raises `InvalidRequest` for one that can never be computed."""
        self.core.add(request)

    def step(self) -> list[InferenceResponse]:
        """Compute one step; the responses of the requests that ended in it, failed ones with `error` set."""
        responses, self._unclaimed = self._unclaimed, []
        return responses + [event.response for event in self.core.step() if event.response is not None]

    def cancel(self, request_id: str) -> InferenceResponse | None:
        """End a request at once; its response so far, or None when there is no such request."""
        event = self.core.cancel(request_id)
        return None if event is None else event.response

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[InferenceRequest],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[InferenceResponse]:
        """Compute `prompts` and give their responses in the same order.

        `prompts` is one prompt or several, each text, token ids or chat messages; or requests, which bring their own
        parameters. `sampling_params` is one for all or one for each. A request that fails or is refused has its
        response's `error` set; the others are not affected. Raises ValueError for arguments of another kind, or when
        the numbers do not match.
        """
        requests = as_requests(prompts, sampling_params)
        responses = {
            event.request_id: event.response
            for event in self._events(requests, stream=False)
            if event.response is not None
        }
        return [responses[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | Sequence[InferenceRequest],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """Compute `prompts` and give text as it comes; the last event of each prompt carries its response.

        Arguments as in `generate`. Leaving the iterator early cancels what is not finished.
        """
        return self._events(as_requests(prompts, sampling_params), stream=True)

    def _events(
        self, requests: Sequence[InferenceRequest | InferenceResponse], *, stream: bool
    ) -> Iterator[StreamEvent]:
        """Submit `requests` and step until all have ended; those that have not when the iterator is left are cancelled.

        Events of other requests, from `submit`, are kept for `step`.
        """
        core, waiting = self.core, set[str]()
        try:
            for request in requests:
                if isinstance(request, InferenceResponse):
                    yield StreamEvent(request.request_id, 0, "", (), "error", request)
                    continue
                try:
                    core.add(request, stream=stream)
                    waiting.add(request.request_id)
                except InvalidRequest as error:
                    yield StreamEvent(request.request_id, 0, "", (), "error", refused(request, error))
            while waiting:
                for event in self.core.step():
                    if event.request_id in waiting:
                        if event.response is not None:
                            waiting.discard(event.request_id)
                        yield event
                    elif event.response is not None:
                        self._unclaimed.append(event.response)
        finally:
            for request_id in waiting:
                core.cancel(request_id)

    def close(self) -> None:
        """Free the model and its caches. What is not finished ends with `EngineClosed`. May be called again."""
        if self._core is not None:
            self._core.close()
            self._core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_generating(model: str) -> None:
    known = BUILTIN.get(model)
    if known is not None and known.kind is not Kind.GENERATE:
        generating = ", ".join(name for name, each in BUILTIN.items() if each.kind is Kind.GENERATE)
        raise UnsupportedModel(f"{model} makes embeddings, not text; a built-in model that generates is {generating}")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
