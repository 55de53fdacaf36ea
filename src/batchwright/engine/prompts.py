"""Conversion of the prompts that callers may pass to requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from batchwright.errors import InvalidRequest
from batchwright.request import InferenceRequest, InferenceResponse, Prompt, SamplingParams, Usage


def as_requests(
    prompts: Prompt | Sequence[Prompt] | Sequence[InferenceRequest],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[InferenceRequest | InferenceResponse]:
    """Return a request for each prompt, or the response to an invalid prompt (`error` says why).

    Raises ValueError if there are not as many parameters as prompts, if requests come with separate parameters, or for
    arguments of other types.
    """
    several = _as_list(prompts)
    if any(isinstance(item, InferenceRequest) for item in several):
        if sampling_params is not None:
            raise ValueError("sampling_params: requests bring their own, leave it out")
        if not all(isinstance(item, InferenceRequest) for item in several):
            raise ValueError("prompts: give either requests or prompts, not both")
        requests = cast(list[InferenceRequest], several)
        if len({request.request_id for request in requests}) != len(requests):
            raise ValueError("request_id: two of the requests have the same one; give each its own")
        return [*requests]
    params: Any = sampling_params
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(several)
    elif not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ValueError(
            f"sampling_params of type {type(params).__name__}: must be one SamplingParams or a list of them"
        )
    if len(params) != len(several):
        raise ValueError(f"sampling_params: {len(params)} for {len(several)} prompts; give one, or one for each")
    made: list[InferenceRequest | InferenceResponse] = []
    for prompt, each in zip(several, params, strict=True):
        try:
            made.append(InferenceRequest.of(cast(Prompt, prompt), each))
        except InvalidRequest as error:
            made.append(refused(InferenceRequest.of("-", each), error))
    return made


def refused(request: InferenceRequest, error: InvalidRequest) -> InferenceResponse:
    """Return the response to a request that was never computed."""
    return InferenceResponse(
        request_id=request.request_id,
        output="",
        tokens_generated=0,
        latency_ms=0.0,
        queue_ms=0.0,
        finish_reason="error",
        usage=Usage(0, 0),
        error=error,
        metadata=request.metadata,
    )


def _as_list(prompts: Any) -> list[Prompt | InferenceRequest]:
    """Return several prompts as a list; one prompt (text, token ids, messages) becomes a list of one."""
    if isinstance(prompts, (str, InferenceRequest)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts of type {type(prompts).__name__}: must be text, a list of token ids, a list of chat "
            "messages, or a list of any of these"
        )
    items = list(prompts)
    if items and isinstance(items[0], (Integral, Mapping)):
        return [items]
    return items
