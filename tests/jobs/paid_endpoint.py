"""A paid endpoint on loopback, which keeps a ledger and fails in ways that cost money, and in ways that do not."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from aiohttp import web

PRICE = "input=200,cached=50,output=1000"
"""Dollars per million tokens: high ones, so that a small job costs dollars."""
INPUT, CACHED, OUTPUT = Decimal(200), Decimal(50), Decimal(1000)


class PaidEndpoint:
    """Answers chats. What it computes it charges, whether or not the answer arrives.

    `faults`: probability of each kind; `delay`: most seconds for an answer.
    """

    def __init__(self, seed: int = 0, faults: dict[str, float] | None = None, delay: float = 0.0) -> None:
        self.draw = random.Random(seed)
        self.faults = faults or {}
        self.delay = delay
        self.ledger = Decimal(0)
        """Dollars that were charged, in all."""
        self.lost = Decimal(0)
        """Dollars of these for answers that did not arrive whole."""
        self.charged = 0
        self.most_under_way = 0
        self._under_way = 0
        self.least_answer = 1
        self.most_answer = 10**6
        """Tokens of an answer, within its limit."""
        self.caches = True
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "paid"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        try:
            return await self._answer(request, body)
        finally:
            self._under_way -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = next((name for name, share in self.faults.items() if self.draw.random() < share), "fine")
        if kind in ("429", "500"):
            return web.json_response({"error": {"message": kind}}, status=int(kind), headers={"retry-after-ms": "1"})
        if kind == "unread":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        usage = self._charge(body, lost=kind != "fine")
        if self.delay:
            await asyncio.sleep(self.draw.uniform(0, self.delay))
        answer = {
            "id": "x",
            "object": "chat.completion",
            "model": "paid",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
            "usage": usage,
        }
        if kind == "504":
            return web.json_response({"error": {"message": kind}}, status=504, headers={"retry-after-ms": "1"})
        if kind == "garbage":
            return web.Response(body=b"<html>", content_type="application/json")
        if kind in ("reset", "half"):
            response = web.StreamResponse(headers={"content-type": "application/json", "content-length": "1000"})
            if kind == "half":
                await response.prepare(request)
                await response.write(b'{"id": "x"')
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.json_response(answer)

    def _charge(self, body: dict[str, Any], *, lost: bool) -> dict[str, Any]:
        prompt = sum(len(each["content"]) + 4 for each in body["messages"])
        cached = self.draw.randrange(prompt) if self.caches else 0
        output = self.draw.randint(self.least_answer, min(self.most_answer, body.get("max_tokens", 100)))
        cost = ((prompt - cached) * INPUT + cached * CACHED + output * OUTPUT) / 10**6
        self.ledger += cost
        self.lost += cost if lost else 0
        self.charged += 1
        details = {"cached_tokens": cached}
        total = prompt + output
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": total}
        return {**usage, "prompt_tokens_details": details}


@contextmanager
def serving(endpoint: PaidEndpoint) -> Iterator[PaidEndpoint]:
    """Serve it from a thread."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.get("/v1/models", endpoint.models), web.post("/v1/chat/completions", endpoint.chat)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        return runner

    def work() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
