"""What the service talks to: a model whose answers depend on nothing but the question, and a receiver of webhooks."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

FAILING = "fail:"
"""A question that begins so is refused."""


def answer_to(question: str) -> str:
    """The only right answer."""
    return hashlib.sha256(question.encode()).hexdigest()


def usage_of(question: str) -> dict[str, int]:
    prompt, completion = len(question), 1 + len(question) % 7
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Outside:
    """Both servers, on a port of 127.0.0.1."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """How often each question was asked."""
        self.events: defaultdict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        """By batch: `webhook-id` and body of each message that was accepted."""
        self.refused: Counter[str] = Counter()
        """How often each message was sent away; the first time always."""
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/hook", self._hook, methods=["POST"]),
            ]
        )
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.01)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._task

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "oracle", "object": "model", "owned_by": "tests"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        question = body["messages"][-1]["content"]
        self.calls[question] += 1
        # Answers overtake each other, so that kills meet batches in every state.
        await asyncio.sleep(int(answer_to(question)[:2], 16) / 256 * 0.02)
        if question.startswith(FAILING):
            error = {
                "message": "this question is refused",
                "type": "invalid_request_error",
                "param": None,
                "code": "no",
            }
            return JSONResponse({"error": error}, 400)
        message = {"role": "assistant", "content": answer_to(question)}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return JSONResponse(
            {
                "id": "chatcmpl-" + answer_to(question)[:12],
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [choice],
                "usage": usage_of(question),
            }
        )

    async def _hook(self, request: Request) -> Response:
        ident, body = request.headers["webhook-id"], json.loads(await request.body())
        self.refused[ident] += 1
        if self.refused[ident] == 1:
            return Response(status_code=503)
        self.events[body["data"]["id"]].append((ident, body))
        return Response(status_code=204)
