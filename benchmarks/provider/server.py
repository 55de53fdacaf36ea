"""A provider on loopback: `python -m benchmarks.provider.server SCENARIO [--headers] [--retry-after]`.

It prints its address and serves until standard input ends: OpenAI's chat completions and Anthropic's messages, both
under `/v1`, and for the benchmark `/ledger`, all requests so far. Its time begins with the first request for an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from benchmarks.provider.answers import Fault
from benchmarks.provider.headers import anthropic_headers, openai_headers
from benchmarks.provider.limits import Refusal
from benchmarks.provider.provider import Provider, Ticket
from benchmarks.provider.scenarios import SCENARIOS, Headers
from benchmarks.remote.limits import raise_descriptor_limit

MODEL = "provided"
_BACKLOG = 4096
_PAGE = "<!DOCTYPE html><html><head><title>Bad gateway</title></head><body>Please try again later.</body></html>"
_FAULT_STATUS = {
    Fault.SERVER_ERROR: 500,
    Fault.UNAVAILABLE: 503,
    Fault.OVERLOADED: 529,
    Fault.TIMEOUT: 408,
}
_FAULT_CODE = {500: "server_error", 503: "server_is_overloaded", 529: "overloaded_error", 408: "timeout"}


class Server:
    """Carries out what a `Provider` decides."""

    def __init__(
        self,
        provider: Provider,
        *,
        headers: Headers | None = None,
        retry_after: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`headers`: the form in which the limits are stated; `retry_after`: whether refusals say when to try again."""
        self._provider = provider
        self._headers = headers
        self._retry_after = retry_after
        self._clock = clock
        self._began: float | None = None

    def application(self) -> web.Application:
        """The routes."""
        application = web.Application(client_max_size=2**30)
        application.add_routes([
            web.get("/v1/models", self._models),
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/messages", self._messages),
            web.get("/ledger", self._ledger),
        ])  # fmt: skip
        return application

    def _now(self) -> float:
        if self._began is None:
            self._began = self._clock()
        return self._clock() - self._began

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})

    async def _ledger(self, _: web.Request) -> web.Response:
        ledger = self._provider.ledger
        ledger.now = 0.0 if self._began is None else self._clock() - self._began
        return web.Response(body=msgspec.json.encode(ledger), content_type="application/json")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _chat_answer)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, _message_answer)

    async def _answer(self, request: web.Request, form: Callable[[Ticket], dict[str, Any]]) -> web.StreamResponse:
        body = await request.json()
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 256
        verdict = self._provider.arrive(self._now(), _prompt(body), most, _key(request))
        if isinstance(verdict, Refusal):
            return self._refused(verdict)
        await asyncio.sleep(verdict.fate.seconds)
        response = await self._respond(request, verdict, form)
        reached = request.transport is not None and not request.transport.is_closing()
        faulty = verdict.fate.fault in (Fault.RESET, Fault.BROKEN)
        self._provider.leave(self._now(), verdict, _status(response, verdict), reached=reached or faulty)
        if faulty and request.transport is not None:
            request.transport.abort()
        # The headers state what is left now that the request is settled.
        if not response.prepared:
            response.headers.update(self._stated())
        return response

    async def _respond(
        self, request: web.Request, ticket: Ticket, form: Callable[[Ticket], dict[str, Any]]
    ) -> web.StreamResponse:
        fault = ticket.fate.fault
        if fault in _FAULT_STATUS:
            status = _FAULT_STATUS[fault]
            return _error(status, _FAULT_CODE[status], "The provider is not well. Please try again.")
        if fault is Fault.HTML:
            return web.Response(text=_PAGE, content_type="text/html")
        content = msgspec.json.encode(form(ticket))
        if fault is Fault.TRUNCATED:
            content = content[: len(content) // 2]
        if fault is not Fault.BROKEN:
            return web.Response(body=content, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(content))})
        try:
            await response.prepare(request)
            await response.write(content[: len(content) // 2])
        except ConnectionError:
            pass  # the client went away before the connection was to be reset
        return response

    def _refused(self, refusal: Refusal) -> web.Response:
        response = _error(refusal.status, refusal.code, refusal.message)
        response.headers.update(self._stated())
        if self._retry_after and refusal.retry_after is not None and math.isfinite(refusal.retry_after):
            response.headers["retry-after"] = str(max(math.ceil(refusal.retry_after), 1))
            response.headers["retry-after-ms"] = str(math.ceil(refusal.retry_after * 1e3))
        return response

    def _stated(self) -> dict[str, str]:
        now = self._now()
        match self._headers:
            case "openai":
                return openai_headers(self._provider.limits, now)
            case "anthropic":
                return anthropic_headers(self._provider.limits, now, time.time())
            case _:
                return {}


def _key(request: web.Request) -> str:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    return request.headers.get("x-api-key", bearer)


def _status(response: web.StreamResponse, ticket: Ticket) -> int:
    return 0 if ticket.fate.fault is Fault.RESET else response.status


def _error(status: int, code: str, message: str) -> web.Response:
    kind = "rate_limit_error" if status == 429 else code
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"type": "error", "error": error}, status=status)


def _prompt(body: dict[str, Any]) -> str:
    """The text of all messages, in their order."""
    system = body.get("system")
    contents = [system, *(message["content"] for message in body["messages"])]
    return "".join(_text(content) for content in contents)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _chat_answer(ticket: Ticket) -> dict[str, Any]:
    usage = ticket.actual
    return {
        "id": f"chatcmpl-{ticket.entry.line}",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ticket.content, "refusal": None},
                "finish_reason": "length" if usage.output_tokens == ticket.estimate.output_tokens else "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }


def _message_answer(ticket: Ticket) -> dict[str, Any]:
    usage = ticket.actual
    return {
        "id": f"msg_{ticket.entry.line}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": ticket.content}],
        "stop_reason": "max_tokens" if usage.output_tokens == ticket.estimate.output_tokens else "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.input_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.output_tokens,
        },
    }


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """The address of a server on loopback, within this block."""
    runner = web.AppRunner(server.application(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=_BACKLOG).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _serve(server: Server) -> None:
    async with listening(server) as address:
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.provider.server")
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--headers", action="store_true", help="state the limits in headers")
    parser.add_argument("--retry-after", action="store_true", help="say with a refusal when to come again")
    given = parser.parse_args(arguments)
    scenario = SCENARIOS[given.scenario]
    provider = Provider(scenario.limits(), scenario.law)
    headers = scenario.headers if given.headers else None
    raise_descriptor_limit()
    asyncio.run(_serve(Server(provider, headers=headers, retry_after=given.retry_after)))


if __name__ == "__main__":
    main()
