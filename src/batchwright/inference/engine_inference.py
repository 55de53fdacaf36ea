"""`EngineInference`: chats and completions, computed by an engine in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any, Protocol, cast

from batchwright.constraints import Constraint
from batchwright.engine.engine_stats import EngineStats, UnfinishedWork
from batchwright.engine.grammars import refusal_of
from batchwright.engine.tokenizer import Tokenizer
from batchwright.errors import BatchwrightError, InvalidRequest
from batchwright.inference.calls import InFlight, TrafficThreads, all_of, chosen_model, closing, merged, time_left
from batchwright.inference.inference import Call, Route, WorkUnderWay
from batchwright.planning.needed_work import Answered
from batchwright.request import (
    InferenceRequest,
    InferenceResponse,
    Prompt,
    SamplingParams,
    StreamEvent,
    Usage,
)
from batchwright.wire.answer_forms import named_in_body
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, RESPONSES_URL, GenerationBody, read_generation
from batchwright.wire.response_answers import ResponseEvents, response_of_chat
from batchwright.wire.responses import Chunks, Echo, Head, completion_body
from batchwright.wire.text_responses import chat_of_response, named_in_response
from batchwright.wire.tool_calls.formats import ThoughtMarks
from batchwright.wire.tool_calls.grammar import call_grammar, lazy_call_grammar, thought_grammar
from batchwright.wire.tool_calls.parser import AnswerForm

_WANTED = 2
"""Sequences to hold per slot of the engine, so that no slot is empty while the next lines are fetched."""


class GeneratingEngine(Protocol):
    """The interface of an engine for `EngineInference`: an `AsyncEngine` or a `SteppedEngine`."""

    model_name: str
    max_model_len: int
    tokenizer: Tokenizer
    blocking: bool
    """Whether the engine computes on the event loop, so that tokenizing in another thread gains nothing."""

    @property
    def stats(self) -> EngineStats: ...

    async def generate(self, request: InferenceRequest, /) -> InferenceResponse: ...

    async def unfinished_work(self, prefix: str) -> UnfinishedWork: ...

    def least_seconds(self, answered: Answered, /) -> float | None: ...

    def stream(self, request: InferenceRequest, /) -> AsyncGenerator[StreamEvent]: ...

    async def close(self) -> None: ...


class EngineInference(Route):
    """Serves one generating model.

    Closing it closes the engine. `names` are the names of the model in requests (default: the engine's own name); the
    first is used in answers to bodies that name no model. `system_fingerprint` is part of every answer.
    """

    endpoints = frozenset({CHAT_URL, COMPLETION_URL, RESPONSES_URL})

    def __init__(
        self,
        engine: GeneratingEngine,
        names: Sequence[str] = (),
        *,
        unix_time: Callable[[], float] = time.time,
        system_fingerprint: str | None = None,
    ) -> None:
        self.engine = engine
        self._fingerprint = system_fingerprint
        self._names = tuple(names) or (engine.model_name,)
        self._unix_time = unix_time
        self._slots = engine.stats.max_num_seqs
        self._context = min(engine.max_model_len, engine.stats.kv_blocks * engine.stats.block_size)
        self._threads = None if engine.blocking else TrafficThreads()
        self._serial = count()
        self._held = InFlight()

    @property
    def models(self) -> Sequence[str]:
        return self._names

    @property
    def room(self) -> int:
        # Online requests leave batches at least one line per slot; otherwise they would take the batches' share.
        return max(_WANTED * self._slots - self._held.total(), self._slots - self._held["batch"])

    @property
    def engine_stats(self) -> EngineStats:
        """Figures of the engine."""
        return self.engine.stats

    async def answer(self, call: Call) -> dict[str, Any]:
        if call.endpoint == RESPONSES_URL:
            chat = replace(call, endpoint=CHAT_URL, body=chat_of_response(call.body))
            with named_in_response():
                return response_of_chat(call.body, await self.answer(chat))
        body, head = self._read(call)
        with self._held.hold(call.traffic, len(body.prompts) * body.n):
            requests = await self._requests(call, body)
            form = self._form(body, requests)
            try:
                responses = await all_of([self._computed(request) for request in requests])
            except InvalidRequest as error:
                raise await self._named(error, call, body) from error
        echoes = [self._echo(body, *pair) for pair in zip(body.prompts, requests, strict=True)] if body.echo else None
        return completion_body(replace(head, form=form), responses, echoes=echoes, prompt_logprobs=body.prompt_logprobs)

    async def stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        if call.endpoint == RESPONSES_URL:
            async with closing(self._response_events(call)) as made:
                async for made_event in made:
                    yield made_event
            return
        body, head = self._read(call)
        usages: list[Usage] = []
        with self._held.hold(call.traffic, len(body.prompts) * body.n):
            requests = await self._requests(call, body)
            chunks = Chunks(replace(head, form=self._form(body, requests)), include_usage=body.include_usage)
            async with aclosing(merged([self._events(request, call, body) for request in requests])) as events:
                async for position, event in events:
                    index = position * body.n + event.index
                    for chunk in chunks.text(
                        index, event.text, logprobs=event.logprobs, finish_reason=event.finish_reason
                    ):
                        yield chunk
                    if event.response is not None:
                        usages.append(event.response.usage)
        for chunk in chunks.usage(usages):
            yield chunk

    async def _response_events(self, call: Call) -> AsyncGenerator[dict[str, Any]]:
        body = chat_of_response(call.body) | {"stream_options": {"include_usage": True}}
        events = ResponseEvents(call.body)
        with named_in_response():
            async with closing(self.stream(replace(call, endpoint=CHAT_URL, body=body))) as chunks:
                async for chunk in chunks:
                    for event in events.of_chunk(chunk):
                        yield event

    async def work_of(self, prefix: str) -> WorkUnderWay:
        unfinished = await self.engine.unfinished_work(prefix)
        stats = self.engine.stats
        return WorkUnderWay(
            steps=stats.steps,
            step_tokens=stats.prefill_tokens + stats.generated_tokens,
            running=unfinished.answers,
            prompt_tokens=unfinished.prompt_tokens,
            prompt_tokens_left=unfinished.prompt_tokens_left,
            places=max(1, self._slots - self._held["online"]),
            longest=self._context,
        )

    def least_seconds(self, endpoint: str, model: str | None, answered: Answered) -> float | None:
        return self.engine.least_seconds(answered)

    async def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
        await self.engine.close()

    def _read(self, call: Call) -> tuple[GenerationBody, Head]:
        body = read_generation(call.body, chat=call.endpoint == CHAT_URL, defaults=call.defaults)
        model = chosen_model(body.model, self._names)
        key, created = call.request_id.removeprefix("req_"), int(self._unix_time())
        return body, Head(key, created, model, body.chat, body.n, self._fingerprint)

    async def _requests(self, call: Call, body: GenerationBody) -> list[InferenceRequest]:
        """Create the requests, with unique ids: a line may be retried before its first try has left the engine."""
        now, left = asyncio.get_running_loop().time, time_left(call, body.deadline)
        began = now()
        # One prompt at a time, so that prompts of other requests get their turn on the thread in between.
        encoded = [
            await self._threads.run(call.traffic, self._encoded, prompt) if self._threads else self._encoded(prompt)
            for prompt in body.prompts
        ]
        body.require_few_prompt_logprobs(sum(map(len, encoded)))
        if left is not None:
            left = time_left(replace(call, timeout=left - (now() - began)), None)
        return [self._request(call, body, ids, left) for ids in encoded]

    def _request(self, call: Call, body: GenerationBody, ids: list[int], left: float | None) -> InferenceRequest:
        params = self._params(body, ids)
        return InferenceRequest.of(
            ids,
            params,
            around_form=self._around_form(params, ids) if body.chat and params.is_constrained else "",
            request_id=f"{call.request_id}-{next(self._serial)}",
            priority=body.priority,
            deadline=left,
            traffic=call.traffic,
            flow=call.flow,
        )

    def _params(self, body: GenerationBody, prompt: Sequence[int]) -> SamplingParams:
        """Return the sampling parameters, with a constraint if an answer must call a tool, or may call a strict one."""
        params, tools = body.params(self._context - len(prompt)), body.tools
        tokenizer = self.engine.tokenizer
        template = tokenizer.chat_template
        if tools is None or template is None or params.is_constrained:
            return params
        places: dict[str, Any] = {
            "parallel": tools.parallel,
            "tokens": tokenizer.markers,
            "thought": self._marks(prompt),
            "in_thought": tokenizer.opens_thought(prompt),
        }
        grammar: str | None = None
        if tools.choice == "required":
            grammar = call_grammar(template.tool_format, tools.schemas, named=tools.named, **places)
        elif tools.choice == "auto" and tools.strict:
            grammar = lazy_call_grammar(template.tool_format, tools.schemas, strict=tools.strict, **places)
        try:
            return params if grammar is None else replace(params, grammar=grammar)
        except InvalidRequest as error:
            raise named_in_body(error, {"tools": tools.tools}) from error

    def _around_form(self, params: SamplingParams, prompt: Sequence[int]) -> str:
        """Return the grammar of a chat's answer that may contain a thought before its form; empty if it may not.

        A grammar in the request describes the whole answer.
        """
        marks = None if params.grammar is not None else self._marks(prompt)
        if marks is None:
            return ""
        tokenizer = self.engine.tokenizer
        return thought_grammar(marks, tokenizer.markers, in_thought=tokenizer.opens_thought(prompt))

    def _marks(self, prompt: Sequence[int]) -> ThoughtMarks | None:
        """Return the marks of a thought that an answer may begin with; None if it has none."""
        tokenizer = self.engine.tokenizer
        if tokenizer.chat_template is None or tokenizer.closes_thought(prompt):
            return None
        return tokenizer.chat_template.thought_marks

    def _form(self, body: GenerationBody, requests: Sequence[InferenceRequest]) -> AnswerForm | None:
        """Return the parts of which the answers to a chat may consist; None if only content."""
        tokenizer = self.engine.tokenizer
        template = tokenizer.chat_template
        if not body.chat or template is None:
            return None
        tools = body.tools if body.tools is not None and body.tools.choice != "none" else None
        # The form of an answer has no room for a thought, unless it was wrapped to allow one.
        marks = None if body.is_constrained and not requests[0].around_form else template.thought_marks
        if tools is None and marks is None:
            return None
        return AnswerForm(
            None if tools is None else template.tool_format,
            None if tools is None else tools.schemas,
            parallel=tools is None or tools.parallel,
            is_json=body.is_json,
            thought=marks,
            in_thought=marks is not None and tokenizer.opens_thought(cast("Sequence[int]", requests[0].prompt)),
        )

    def _encoded(self, prompt: Prompt) -> list[int]:
        try:
            return self.engine.tokenizer.encode(prompt)
        except BatchwrightError:
            raise
        except Exception as error:  # a tokenizer is foreign code, and its errors affect only this request
            raise InvalidRequest(f"the tokenizer refuses the prompt: {error}", param="prompt") from error

    def _echo(self, body: GenerationBody, prompt: Prompt, request: InferenceRequest) -> Echo:
        """Return the prompt of a request for the echo; a prompt of token ids is decoded."""
        tokenizer, ids = self.engine.tokenizer, cast("Sequence[int]", request.prompt)
        text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
        return Echo(text, tokenizer.token_text(ids[0]), body.echoed_logprobs)

    async def _computed(self, request: InferenceRequest) -> InferenceResponse:
        return self._accepted(await self.engine.generate(request))

    async def _events(self, request: InferenceRequest, call: Call, body: GenerationBody) -> AsyncGenerator[StreamEvent]:
        try:
            async with aclosing(self.engine.stream(request)) as events:
                async for event in events:
                    if event.response is not None:
                        self._accepted(event.response)
                    yield event
        except InvalidRequest as error:
            raise await self._named(error, call, body) from error

    async def _named(self, error: InvalidRequest, call: Call, body: GenerationBody) -> InvalidRequest:
        """Return `error` with the body's field that it is about, and the tool if the error is in a grammar of calls."""
        if error.param == "grammar" and body.tools is not None and not body.is_constrained:
            held = body.tools.held
            refused = await self._threads.run(call.traffic, _refused, held) if self._threads else _refused(held)
            if refused is not None:
                return refused
        return named_in_body(error, call.body)

    def _accepted(self, response: InferenceResponse) -> InferenceResponse:
        """Return `response`. Raises its error, if it has one."""
        if response.error is not None:
            raise response.error
        return response


def _refused(schemas: Mapping[str, Mapping[str, Any]]) -> InvalidRequest | None:
    """Return the error for the first of the tools with these schemas whose arguments cannot be held to its schema."""
    for name, schema in schemas.items():
        refusal = refusal_of(Constraint("schema", json.dumps({**schema, "type": "object"})))
        if refusal is not None:
            return InvalidRequest(f"tools: the parameters of {name}: {refusal}", param="tools")
    return None
