"""Static padded generation: transformers' `generate` over one batch that begins and ends together.

This is the plain way of doing what `Engine` does better: rows are padded on the left to the longest prompt, and the
batch runs until its last row has ended. `generate` computes the logits; the engine's own sampling decides which token
each row takes, and when it ends, so that every request has its own parameters in a batch with others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchwright.clock import Clock, MonotonicClock
from batchwright.engine.bodies.load import choose_device, choose_dtype
from batchwright.engine.generation import Generation, RequestState
from batchwright.engine.grammars import Grammars, MaskMaker
from batchwright.engine.pretrained import load_pretrained
from batchwright.engine.sampling import hold_ends, sample
from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import (
    BatchwrightError,
    ContextLengthExceeded,
    InvalidRequest,
    NonFiniteLogits,
    UnsupportedModel,
)
from batchwright.models import DEFAULT_MODEL, resolve, served_name
from batchwright.padding import PaddingConfig, PaddingOptimizer
from batchwright.request import InferenceRequest, InferenceResponse, SamplingParams
from batchwright.scheduling import Sequence as TokenSequence

Answer = InferenceResponse | BatchwrightError


class StaticGenerator:
    """Text generation by any causal language model of transformers, a whole batch at a time.

        Batcher(StaticGenerator(), policy=...)

    `model` is a built-in name, a folder in transformers format, a GGUF file or a hub id. `dtype` is auto, float32,
    bfloat16 or float16; `device` auto, cpu, cuda or cuda:N. `max_model_len` bounds prompt and output together (default:
    what the model was made for).

    May be called from several threads, but only for one batch at a time. Raises `ModelNotFound`, `UnsupportedModel` or
    `DownloadError` for the model, ValueError for a setting.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._device = choose_device(device)
        folder = resolve(str(model), weights="values")
        wanted, kind = f"{folder} as a causal language model", choose_dtype(dtype, self._device)
        self._model, missing = load_pretrained(AutoModelForCausalLM, folder, wanted, kind, self._device)
        if missing:
            raise UnsupportedModel(
                f"{folder} is no causal language model: it has no weights for {missing[0]} and "
                f"{len(missing) - 1} others"
            )
        # Otherwise a model's own sampling defaults would apply wherever a request sets nothing.
        make: Any = GenerationConfig
        self._model.generation_config = make(pad_token_id=0)
        config = self._model.config.get_text_config()
        made_for = getattr(config, "max_position_embeddings", None) or 2**20
        if max_model_len is not None and not 1 <= max_model_len <= made_for:
            raise ValueError(f"max_model_len={max_model_len}: must be 1 to {made_for}, what this model takes at most")
        self.max_model_len: int = max_model_len or made_for
        self.tokenizer = Tokenizer(folder, config.vocab_size)
        self._grammars = Grammars(self.tokenizer, config.vocab_size)
        self._masks = MaskMaker(config.vocab_size)
        self.model_name = served_name(str(model))
        self._clock = clock or MonotonicClock()
        self._one_at_a_time = threading.Lock()

    def generate_batch(
        self, prompts: list[Any], requests: Sequence[InferenceRequest | SamplingParams | None] | None = None
    ) -> list[Answer]:
        """Return an answer for each prompt (text, token ids or chat messages) with the parameters of its request.

        `requests` has an entry for each prompt, None for the default parameters, and may be omitted. A prompt that
        cannot be computed, or whose logits are not finite, gets an error in place of its answer. Raises ValueError if
        there are not as many requests as prompts.
        """
        if requests is not None and len(requests) != len(prompts):
            raise ValueError(f"requests: {len(requests)} for {len(prompts)} prompts; give one for each")
        with self._one_at_a_time:
            began = self._clock.now()
            states = [
                self._begin(prompt, request, began)
                for prompt, request in zip(prompts, requests or [None] * len(prompts), strict=True)
            ]
            rows = [row for state in states if isinstance(state, RequestState) for row in state.generations]
            if rows:
                self._run(rows)
            now = self._clock.now()
        return [state if isinstance(state, InvalidRequest) else state.error or state.response(now) for state in states]

    def _begin(
        self, prompt: Any, request: InferenceRequest | SamplingParams | None, now: float
    ) -> RequestState | InvalidRequest:
        try:
            if not isinstance(request, InferenceRequest):
                request = InferenceRequest.of(prompt, request or SamplingParams())
            ids = self.tokenizer.encode(prompt)
            if request.prompt_logprobs is not None:
                raise InvalidRequest(
                    f"prompt_logprobs={request.prompt_logprobs}: they are not computed here; leave it out, or use an "
                    "Engine",
                    param="prompt_logprobs",
                )
            constraint = request.constraint
            matchers = [None if constraint is None else self._grammars.matcher(constraint) for _ in range(request.n)]
        except InvalidRequest as error:
            return error
        except Exception as error:  # a tokenizer is foreign code; whatever it raises fails this prompt only
            return InvalidRequest(f"the tokenizer refuses the prompt: {error}", param="prompt")
        total = len(ids) + request.max_tokens
        if total > self.max_model_len:
            return ContextLengthExceeded(
                f"prompt of {len(ids)} tokens and max_tokens={request.max_tokens} are {total}: the model takes "
                f"{self.max_model_len}, shorten the prompt or lower max_tokens"
            )
        state = RequestState(request, len(ids), now, streams=False, first_step_at=now)
        for index, matcher in enumerate(matchers):
            sequence = TokenSequence(tokens=list(ids), num_prompt=len(ids), max_total=total)
            state.generations.append(
                Generation(state, index, sequence, self.tokenizer, incremental=False, matcher=matcher)
            )
        return state

    @torch.inference_mode()
    def _run(self, rows: list[Generation]) -> None:
        prompts = [row.sequence.tokens for row in rows]
        longest = max(map(len, prompts))
        padding = PaddingOptimizer(PaddingConfig(padding_side="left", max_length=longest))
        ids, mask = (torch.from_numpy(part).to(self._device) for part in padding.pad_batch(prompts))
        chooser = _Chooser(rows, self._masks, self._clock)
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,  # the token that the chooser takes gets the greatest score
            max_new_tokens=max(row.owner.request.max_tokens for row in rows),
            logits_processor=[chooser.choose],
            stopping_criteria=[chooser.ended],
        )


class _Chooser:
    """Hooks of `generate` that choose each row's next token and its end."""

    def __init__(self, rows: list[Generation], masks: MaskMaker, clock: Clock) -> None:
        self._rows, self._masks, self._clock = rows, masks, clock

    def choose(self, _: Tensor, scores: Tensor) -> Tensor:
        """Return 0 for the token that each row of `scores` [rows, vocab] takes, and -inf for all others."""
        live = [at for at, row in enumerate(self._rows) if not _is_over(row)]
        states = [self._rows[at].sampling for at in live]
        matchers = [state.matcher for state in states if state.matcher is not None]
        masks = self._masks.masks([(matcher, ()) for matcher in matchers]) if matchers else None
        if masks is not None:
            hold_ends(states, masks)
        # Masks are applied in place, and these scores belong to the library.
        outcomes = sample(scores[live] if len(live) < len(self._rows) or matchers else scores, states, masks=masks)
        tokens = np.zeros(len(self._rows), np.int64)
        for at, outcome in zip(live, outcomes, strict=True):
            row = self._rows[at]
            if row.matcher is not None and (failure := row.matcher.failure) is not None:
                row.owner.error = failure
                continue
            if outcome.token is None:
                row.owner.error = NonFiniteLogits("the model produced NaN or infinite logits for this request")
                continue
            tokens[at] = outcome.token
            if row.owner.first_token_at is None:
                row.owner.first_token_at = self._clock.now()
            row.accept(outcome)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, torch.from_numpy(tokens).to(scores.device)[:, None], 0.0)

    def ended(self, ids: Tensor, _: Any, **__: Any) -> Tensor:
        """Return which rows have ended -> [rows] bool."""
        return torch.tensor([_is_over(row) for row in self._rows], device=ids.device)


def _is_over(row: Generation) -> bool:
    return row.finish_reason is not None or row.owner.error is not None
