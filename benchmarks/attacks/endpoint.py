"""An OpenAI-compatible endpoint that answers without computing, as a process: `python -m benchmarks.attacks.endpoint`.

It answers `max_tokens` (16) tokens, at once or `--token-ms` apart, and vectors for embeddings. It prints its address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from contextlib import suppress
from typing import Any

_MODEL = "scripted"
_VECTOR = [0.5, 0.5, 0.5, 0.5]


class _Endpoint:
    def __init__(self, token_seconds: float, word: str) -> None:
        self._token_seconds = token_seconds
        self._word = word

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection until it ends."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                await self._answer(head[0].split()[1], json.loads(body or b"{}"), writer)
        writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path.endswith("/models"):
            _whole(writer, {"object": "list", "data": [{"id": _MODEL, "object": "model", "created": 1}]})
        elif path.endswith("/embeddings"):
            inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
            data = [{"object": "embedding", "index": i, "embedding": _VECTOR} for i in range(len(inputs))]
            usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
            _whole(writer, {"object": "list", "data": data, "model": _MODEL, "usage": usage})
        elif body.get("stream"):
            await self._stream(path, body, writer)
        else:
            tokens = body.get("max_tokens") or 16
            await asyncio.sleep(tokens * self._token_seconds)
            _whole(writer, _body(path, self._word * tokens, tokens))
        await writer.drain()

    async def _stream(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(body.get("max_tokens") or 16):
            part = {"index": 0, "finish_reason": None} | _part(path, self._word, "delta")
            event = _head(path, "chunk") | {"choices": [part]}
            _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            await writer.drain()
            await asyncio.sleep(self._token_seconds)
        last = _head(path, "chunk") | {"choices": [{"index": 0, "finish_reason": "stop"} | _part(path, "", "delta")]}
        _chunk(writer, b"data: " + json.dumps(last).encode() + b"\n\n")
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")


def _head(path: str, kind: str = "") -> dict[str, Any]:
    chat = "chat.completion" + (f".{kind}" if kind else "")
    return {"id": "x", "object": chat if "chat" in path else "text_completion", "created": 1, "model": _MODEL}


def _part(path: str, text: str, field: str) -> dict[str, Any]:
    return {field: {"role": "assistant", "content": text}} if "chat" in path else {"text": text}


def _body(path: str, text: str, tokens: int) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop"} | _part(path, text, "message")
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    return _head(path) | {"choices": [choice], "usage": usage}


def _whole(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)


def _chunk(writer: asyncio.StreamWriter, content: bytes) -> None:
    writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token-ms", type=float, default=0.0, help="Between two tokens.")
    parser.add_argument("--word", default="word ", help="The text of every token.")
    given = parser.parse_args()
    endpoint = _Endpoint(given.token_ms / 1e3, given.word)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0, limit=2**24)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
