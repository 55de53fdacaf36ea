"""`Engine`: a model, its KV cache and its scheduler, for callers that are not asynchronous."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from batchwright.clock import Clock, MonotonicClock
from batchwright.engine.bodies import load_body
from batchwright.engine.core import EngineCore
from batchwright.engine.engine_stats import EngineStats
from batchwright.engine.kv_memory import num_kv_blocks
from batchwright.engine.prompts import as_requests, refused
from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import EngineClosed, InvalidRequest, UnsupportedModel
from batchwright.kv import BlockManager
from batchwright.models import BUILTIN, DEFAULT_MODEL, Kind, resolve
from batchwright.request import InferenceRequest, InferenceResponse, Prompt, SamplingParams, StreamEvent
from batchwright.scheduling import Scheduler, SloController

BLOCK_SIZE = 16
_BATCH_TOKENS = {"cpu": 512, "cuda": 8192}
_NUM_SEQS = 256
DEFAULT_BATCH_SHARE = 0.05
"""Little enough for online traffic not to miss, and a batch of a thousand lines still ends."""


class Engine:
    """Continuous batching over one model.

    `model` is a built-in name, a folder in transformers format, a GGUF file or a hub id. `dtype` is auto, float32,
    bfloat16 or float16; `device` auto, cpu, cuda or cuda:N. A step computes at most `max_batch_tokens` tokens (default
    512 on the CPU, 8192 on CUDA) of at most `max_num_seqs` sequences (256). `max_model_len` bounds prompt and output
    together (default: what the model was made for). `kv_memory` is bytes, or text such as "2GiB" (default: a share of
    the free memory). `quantization="int8"` multiplies weights and activations in 8 bits; where whole layers are
    compiled (a C++ compiler, AVX2 without AMX, `dtype` bfloat16) keys and values have 8 bits too. `body` and
    `attention` choose an implementation; "auto" is the fastest that is right. `drafting` lets steps of few rows also
    compute guesses at the next tokens of greedy requests, which change no token.

    `deterministic=True` promises that what a request gives, its log-probabilities included, is bitwise independent of
    what else is in the batch, of preemption, of prefix-cache hits and of the sizes of steps; a request that is drawn
    needs a seed for that. Where it cannot be promised, `UnsupportedModel` names the reason and the remedy.

    Requests with `traffic="batch"` fill what online ones leave. `ttft_ms` and `tpot_ms` (milliseconds; None: no bound)
    are what online requests must keep to, to the first token and for each token after it: steps carry no more batch
    tokens than that allows. Of all tokens computed, batches get at least the share `batch_share` (0 ≤ share < 1),
    whatever online traffic there is; 0 lets it starve them. Within a class, a request that is `promote_after` seconds
    old goes before all priorities; None turns that off.

    Raises `ModelNotFound`, `UnsupportedModel` or `DownloadError` for the model, ValueError for a setting.
    Not safe for use from several threads: that is what `AsyncEngine` is for.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_batch_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        kv_memory: str | int | None = None,
        prefix_caching: bool = True,
        drafting: bool = True,
        quantization: str | None = None,
        deterministic: bool = False,
        body: str = "auto",
        attention: str = "auto",
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        batch_share: float = DEFAULT_BATCH_SHARE,
        promote_after: float | None = 60.0,
        clock: Clock | None = None,
    ) -> None:
        _require_generating(str(model))
        slo = SloController(ttft=_seconds("ttft_ms", ttft_ms), tpot=_seconds("tpot_ms", tpot_ms))
        folder = resolve(str(model))
        self.model_name = str(model)
        loaded = load_body(
            folder, body=body, dtype=dtype, device=device, quantization=quantization, attention=attention
        )
        length = _checked("max_model_len", max_model_len, loaded.max_model_len)
        if length > loaded.max_model_len:
            raise ValueError(f"max_model_len={length}: this model takes {loaded.max_model_len} tokens at most")
        num_seqs = _checked("max_num_seqs", max_num_seqs, _NUM_SEQS)
        batch_tokens = _checked("max_batch_tokens", max_batch_tokens, _BATCH_TOKENS.get(loaded.device.type, 512))
        most_blocks = num_seqs * -(-length // BLOCK_SIZE)
        num_blocks = num_kv_blocks(loaded.kv_shapes(1, BLOCK_SIZE, attention), kv_memory, most_blocks)
        loaded.allocate(num_blocks, BLOCK_SIZE, attention)
        if deterministic and (reason := loaded.why_not_deterministic(batch_tokens, num_seqs)) is not None:
            raise UnsupportedModel(f"deterministic=True is not possible: {reason}")
        scheduler = Scheduler(
            BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching),
            max_batch_tokens=batch_tokens,
            max_num_seqs=num_seqs,
            promote_after=promote_after,
            batch_share=batch_share,
            draft_rows=loaded.free_rows if drafting else 0,
            slo=slo,
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


def _seconds(name: str, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{name}={value}: must be more than 0 milliseconds, or None for no bound")
    return None if value is None else value / 1e3


def _checked(name: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: must be a whole number")
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")
    return value
