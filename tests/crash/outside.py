"""What the service talks to: a model whose answers depend on nothing but the question, and a receiver of webhooks."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

FAILING = "fail:"
"""A question that begins so is refused."""


def answer_to(question: str) -> str:
    """The only right answer."""
    return hashlib.sha256(question.encode()).hexdigest()


def vector_of(question: str) -> list[float]:
    """The only right embedding."""
    return [byte / 256 for byte in hashlib.sha256(question.encode()).digest()[:8]]


def usage_of(question: str) -> dict[str, int]:
    prompt, completion = len(question), 1 + len(question) % 7
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


Trouble = Literal["500", "429", "hanging"]
"""How the model fails every call: with a status, or without an answer for as long as the trouble lasts."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are for the program, of which these servers are a part.
        yield


class Outside:
    """Both servers, on a port of 127.0.0.1 which stays the same from one start to the next."""

    def __init__(self) -> None:
        self.port = 0
        self._untroubled = asyncio.Event()
        self._untroubled.set()
        self._trouble: Trouble | None = None
        self._unanswered: dict[str, asyncio.Event] = {}
        self.calls: Counter[str] = Counter()
        """How often each question was asked."""
        self.events: defaultdict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        """By batch: `webhook-id` and body of each message that was accepted."""
        self.refused: Counter[str] = Counter()
        """How often each message was sent away; the first time always."""
        self._app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/embeddings", self._embedding, methods=["POST"]),
                Route("/hook", self._hook, methods=["POST"]),
            ]
        )

    @property
    def trouble(self) -> Trouble | None:
        """What is wrong with the model now; the receiver is not concerned."""
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: Trouble | None) -> None:
        self._trouble = trouble
        if trouble == "hanging":
            self._untroubled.clear()
        else:
            self._untroubled.set()

    @contextmanager
    def unanswered(self, question: str) -> Iterator[None]:
        """Let calls with this question wait until the context ends."""
        answered = self._unanswered[question] = asyncio.Event()
        try:
            yield
        finally:
            del self._unanswered[question]
            answered.set()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = _Server(uvicorn.Config(self._app, port=self.port, log_level="critical", lifespan="off"))
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections until the next `start`."""
        self._server.should_exit = self._server.force_exit = True
        await self._task

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "oracle", "object": "model", "owned_by": "tests"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        question = body["messages"][-1]["content"]
        refusal = await self._refusal(question)
        if refusal is not None:
            return refusal
        if body.get("stream"):
            # Every stream ends with its usage, asked for or not.
            return StreamingResponse(_events(body["model"], question), media_type="text/event-stream")
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

    async def _completion(self, request: Request) -> Response:
        body = await request.json()
        question = body["prompt"]
        refusal = await self._refusal(question)
        if refusal is not None:
            return refusal
        return JSONResponse(
            {
                "id": "cmpl-" + answer_to(question)[:12],
                "object": "text_completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "text": answer_to(question), "finish_reason": "stop", "logprobs": None}],
                "usage": usage_of(question),
            }
        )

    async def _embedding(self, request: Request) -> Response:
        body = await request.json()
        question = body["input"]
        refusal = await self._refusal(question)
        if refusal is not None:
            return refusal
        prompt = usage_of(question)["prompt_tokens"]
        return JSONResponse(
            {
                "object": "list",
                "data": [{"object": "embedding", "index": 0, "embedding": vector_of(question)}],
                "model": body["model"],
                "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
            }
        )

    async def _refusal(self, question: str) -> Response | None:
        """Count the call and take the time that it takes; the error to answer with, if any."""
        self.calls[question] += 1
        # Answers overtake each other, so that kills meet batches in every state.
        await asyncio.sleep(int(answer_to(question)[:2], 16) / 256 * 0.02)
        await self._untroubled.wait()
        if question in self._unanswered:
            await self._unanswered[question].wait()
        if self._trouble is not None:
            return _error(int(self._trouble), "server_error", "there is trouble")
        if question.startswith(FAILING):
            return _error(400, "invalid_request_error", "this question is refused")
        return None

    async def _hook(self, request: Request) -> Response:
        ident, body = request.headers["webhook-id"], json.loads(await request.body())
        self.refused[ident] += 1
        if self.refused[ident] == 1:
            return Response(status_code=503)
        self.events[body["data"]["id"]].append((ident, body))
        return Response(status_code=204)


def _error(status: int, kind: str, message: str) -> Response:
    error = {"message": message, "type": kind, "param": None, "code": "no"}
    return JSONResponse({"error": error}, status, headers={"retry-after": "1"} if status == 429 else None)


async def _events(model: str, question: str) -> AsyncIterator[str]:
    """The answer in pieces, long enough on the way for a client to hang up in its midst."""
    answer = answer_to(question)
    pieces = [answer[start : start + 8] for start in range(0, len(answer), 8)]
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
    deltas += [({"content": piece}, None) for piece in pieces]
    deltas.append(({}, "stop"))
    chunk = {"id": "chatcmpl-" + answer[:12], "object": "chat.completion.chunk", "created": 0, "model": model}
    for delta, reason in deltas:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield f"data: {json.dumps(chunk | {'choices': [choice]})}\n\n"
        await asyncio.sleep(0.01)
    yield f"data: {json.dumps(chunk | {'choices': [], 'usage': usage_of(question)})}\n\n"
    yield "data: [DONE]\n\n"
