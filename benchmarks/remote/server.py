"""An endpoint that gives every chat the same answer after a fixed time: `python -m benchmarks.remote.server SECONDS`.

It prints its port, serves until standard input ends, and parses as little as it can: its processor time is not what is
measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from benchmarks.remote.limits import raise_descriptor_limit

_BACKLOG = 4096
_ANSWER = json.dumps({
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_800_000_000,
    "model": "stub",
    "choices": [{
        "index": 0,
        "message": {"role": "assistant", "content": "The quick brown fox jumps over the lazy dog. " * 4},
        "finish_reason": "stop",
        "logprobs": None,
    }],
    "usage": {"prompt_tokens": 24, "completion_tokens": 40, "total_tokens": 64},
}).encode()  # fmt: skip
_MODELS = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode()


def _response(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_CHAT, _LIST = _response(_ANSWER), _response(_MODELS)


class _Connection(asyncio.Protocol):
    """One request at a time, as clients send them that do not pipeline."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        _, named, rest = head.lower().partition(b"content-length:")
        if len(body) < (int(rest.partition(b"\r\n")[0]) if named else 0):
            return
        self._received = b""
        response = _LIST if head.startswith(b"GET") else _CHAT
        asyncio.get_running_loop().call_later(self._seconds, self._answer, response)

    def _answer(self, response: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(response)


async def serve(seconds: float) -> None:
    """Serve on loopback until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(seconds), "127.0.0.1", 0, backlog=_BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


def main(arguments: Sequence[str]) -> None:
    raise_descriptor_limit()
    asyncio.run(serve(float(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
