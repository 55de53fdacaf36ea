"""What callers may pass as prompts, turned into requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from batchwright.errors import InvalidRequest
from batchwright.request import InferenceRequest, InferenceResponse, Prompt, SamplingParams, Usage


def as_requests(
    prompts: Prompt | Sequence[Prompt] | Sequence[InferenceRequest],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> list[InferenceRequest]:
    """One request for each prompt.

    Raises ValueError when there are not as many parameters as prompts, or when requests come with parameters beside
    them; `InvalidRequest` for something that is no prompt.
    """
    several = _as_list(prompts)
    if several and all(isinstance(item, InferenceRequest) for item in several):
        if sampling_params is not None:
            raise ValueError("sampling_params: requests bring their own, leave it out")
        return _distinct(cast(list[InferenceRequest], several))
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params: Sequence[SamplingParams] = [sampling_params or SamplingParams()] * len(several)
    else:
        params = sampling_params
    if len(params) != len(several):
        raise ValueError(f"sampling_params: {len(params)} for {len(several)} prompts; give one, or one for each")
    return [InferenceRequest.of(cast(Prompt, prompt), p) for prompt, p in zip(several, params, strict=True)]


def refused(request: InferenceRequest, error: InvalidRequest) -> InferenceResponse:
    """The response to a request that was never computed."""
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
    """One prompt (text, token ids, messages) becomes a list of one."""
    if isinstance(prompts, (str, InferenceRequest)):
        return [prompts]
    items = list(prompts)
    if items and isinstance(items[0], (int, Mapping)):
        return [items]
    return items


def _distinct(requests: list[InferenceRequest]) -> list[InferenceRequest]:
    if len({request.request_id for request in requests}) != len(requests):
        raise ValueError("request_id: two of the requests have the same one; give each its own")
    return requests
