"""A provider of batches on loopback, in OpenAI's form and in Anthropic's, with a ledger of what it computed."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qs, urlsplit

Fault: TypeAlias = int | Literal["lost", "deaf"] | None
"""A status that is answered in place of doing anything; lost: it is done and the connection closed without an answer;
deaf: nothing is done, and the connection closed."""


PRICE = "input=200,cached=50,cache_write=300,output=1000,batch=0.5"
"""Dollars per million tokens: high ones, so that a small job costs dollars."""


@dataclass
class Batch:
    """A batch; it goes on a little each time that somebody looks at any."""

    id: str
    lines: list[dict[str, Any]]
    created_at: float
    mark: str | None = None
    file: str | None = None
    endpoint: str = ""
    window: str = ""
    key: str | None = None
    done: int = 0
    status: str = "in_progress"
    errors: list[dict[str, Any]] = field(default_factory=list)
    output: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    listed_at: float = 0.0
    """Time from which it is in lists."""
    anthropic: bool = False

    @property
    def tokens(self) -> float:
        return sum(len(json.dumps(line)) for line in self.lines) / 4

    @property
    def is_running(self) -> bool:
        return self.status in ("validating", "in_progress", "cancelling")


class BatchServer(ThreadingHTTPServer):
    """The provider. `faults` is asked before each request, with its step and how often it was made."""

    daemon_threads = True

    def __init__(self, handler: type[BatchHandler] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), handler or BatchHandler)
        self.lock = threading.RLock()
        self.files: dict[str, tuple[str, str, bytes]] = {}
        self.batches: dict[str, Batch] = {}
        self.paid: Counter[str] = Counter()
        """Lines that were computed, by prompt."""
        self.ledger = Decimal(0)
        """Dollars that were charged for them, at `PRICE`."""
        self.headers: list[dict[str, str]] = []
        """Headers of each request, by their names in lower case."""
        self.bodies: list[dict[str, Any]] = []
        """Bodies that were computed."""
        self.asked: Counter[str] = Counter()
        """Requests by step."""
        self.faults: Callable[[str, int], Fault] = lambda step, number: None
        self.pace = 10**9
        """Lines of each batch that are computed between two looks."""
        self.expires_at = 10**9
        """Lines after which a batch expires."""
        self.lag = 0.0
        """Seconds for which a new batch is still missing in lists."""
        self.enqueued_limit = float("inf")
        self.metadata = True
        self.refuses: Callable[[dict[str, Any]], str | None] = lambda body: None
        """The code with which a line has its batch refused, if any."""
        self.busy: set[str] = set()
        """Prompts whose next line fails with 429."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def advance(self) -> None:
        """Compute some lines of each batch."""
        for batch in self.batches.values():
            if not batch.is_running:
                continue
            if batch.status == "cancelling":
                self.end(batch, "cancelled")
                continue
            if batch.status == "validating":
                self.validate(batch)
                continue
            until = min(len(batch.lines), batch.done + self.pace, self.expires_at)
            for line in batch.lines[batch.done : until]:
                self.compute(batch, line)
            batch.done = until
            if batch.done == len(batch.lines):
                self.end(batch, "completed")
            elif batch.done >= self.expires_at:
                self.end(batch, "expired")

    def validate(self, batch: Batch) -> None:
        others = sum(
            each.tokens for each in self.batches.values() if each is not batch and each.status == "in_progress"
        )
        if others + batch.tokens > self.enqueued_limit:
            limit = f"{self.enqueued_limit:,.0f}"
            message = f"Enqueued token limit reached for m in organization org. Limit: {limit} enqueued tokens. Wait."
            batch.errors = [{"code": "token_limit_exceeded", "message": message, "line": None, "param": None}]
        for number, line in enumerate(batch.lines, start=1):
            if (code := self.refuses(line.get("body") or line["params"])) is not None:
                batch.errors.append({"code": code, "message": f"no line {number}", "line": number, "param": None})
        batch.status = "failed" if batch.errors else "in_progress"

    def compute(self, batch: Batch, line: dict[str, Any]) -> None:
        body = line.get("body") or line["params"]
        prompt = prompt_of(body)
        custom_id = line["custom_id"]
        if prompt in self.busy:
            self.busy.discard(prompt)
            error = {"message": "too many", "code": "rate_limit_exceeded", "type": "rate_limit_error"}
            batch.failed.append(_failed(custom_id, 429, error))
        elif prompt.startswith("fail"):
            error = {
                "message": f"no {prompt}",
                "code": "bad_prompt",
                "type": "invalid_request_error",
                "param": "prompt",
            }
            batch.failed.append(_failed(custom_id, 400, error))
        else:
            self.paid[prompt] += 1
            response = {"status_code": 200, "request_id": "r", "body": self.charged(body, batch.anthropic, Decimal(2))}
            batch.output.append({"id": "b", "custom_id": custom_id, "response": response, "error": None})

    def charged(self, body: dict[str, Any], anthropic: bool, discount: Decimal = Decimal(1)) -> dict[str, Any]:
        """Return the answer to a body, and charge for it."""
        self.bodies.append(body)
        answered = message(body) if anthropic and "max_tokens" in body else answer(body)
        usage = answered["usage"]
        written, cached = usage.get("cache_creation_input_tokens", 0), usage.get("cache_read_input_tokens", 0)
        plain = usage["input_tokens"] if "input_tokens" in usage else usage["prompt_tokens"]
        output = usage["output_tokens"] if "output_tokens" in usage else usage["completion_tokens"]
        self.ledger += Decimal(plain * 200 + cached * 50 + written * 300 + output * 1000) / 10**6 / discount
        return answered

    def end(self, batch: Batch, status: str) -> None:
        for line in batch.lines[batch.done :]:
            code = "batch_expired" if status == "expired" else "batch_cancelled"
            error = {"code": code, "message": "it was not computed in time"}
            batch.failed.append({"id": "b", "custom_id": line["custom_id"], "response": None, "error": error})
        batch.status = status


def _failed(custom_id: str, status: int, error: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": "r", "body": {"error": error}}
    return {"id": "b", "custom_id": custom_id, "response": response, "error": None}


def prompt_of(body: dict[str, Any]) -> str:
    if "input" in body:
        return str(body["input"])
    content = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


def message(body: dict[str, Any]) -> dict[str, Any]:
    """Says the prompt in capitals, as Anthropic does."""
    assert "max_tokens" in body
    assert "n" not in body
    usage = {"input_tokens": 3, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 7, "output_tokens": 2}
    return {
        "id": "msg_x",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [{"type": "text", "text": prompt_of(body).upper()}],
        "stop_reason": "end_turn",
        "usage": usage,
    }


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Says the prompt in capitals."""
    text = prompt_of(body).upper()
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    if "input" in body:
        content = [{"type": "output_text", "text": text}]
        usage = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}
        output = [{"type": "message", "role": "assistant", "content": content}]
        return {"id": "x", "object": "response", "model": body.get("model"), "output": output, "usage": usage}
    if "prompt" in body:
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop"}
    else:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "x", "object": "text_completion", "model": body.get("model"), "choices": [choice], "usage": usage}


class BatchHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: BatchServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.handle_step(b"")

    def do_POST(self) -> None:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            raise AssertionError("a body of unknown length")
        size = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(size)
        if len(body) == size or self.path.endswith("/files"):
            # Part of a file is kept as if it were a file.
            self.handle_step(body)

    def handle_step(self, body: bytes) -> None:
        url = urlsplit(self.path)
        parts = self.parts(url.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        anthropic = parts[:2] == ["messages", "batches"]
        if anthropic:
            assert self.headers["anthropic-version"]
            parts = ["batches", *parts[2:]]
        step = self.step(parts)
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        with self.server.lock:
            self.server.asked[step] += 1
            fault = self.server.faults(step, self.server.asked[step])
            if isinstance(fault, int):
                self.send(fault, {"error": {"message": f"no {step}", "code": None, "type": "t"}})
                return
            if fault == "deaf":
                self.close_connection = True
                return
            status, answer = getattr(self, step)(parts, query, body, anthropic)
            if fault == "lost":
                self.close_connection = True
                return
            self.send(status, answer)

    def parts(self, path: str) -> list[str]:
        return path.removeprefix("/v1/").split("/")

    def step(self, parts: list[str]) -> str:
        method = self.command
        match parts:
            case ["models"]:
                return "models"
            case ["files"]:
                return "upload" if method == "POST" else "list_files"
            case ["files", _, "content"]:
                return "content"
            case ["batches"]:
                return "create" if method == "POST" else "list_batches"
            case ["batches", _, "cancel"]:
                return "cancel"
            case ["batches", _, "results"]:
                return "results"
            case ["batches", _]:
                return "retrieve"
        return "live"

    def models(self, *_: Any) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [{"id": "m"}, {"id": "n"}]}

    def live(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        if not body:
            return 404, {"error": {"message": "no such path"}}
        asked = json.loads(body)
        self.server.paid[prompt_of(asked)] += 1
        return 200, self.server.charged(asked, parts == ["messages"])

    def form(self, body: bytes) -> dict[str, tuple[str | None, bytes]]:
        """Return the parts of a form, each with the name of its file."""
        head = f"content-type: {self.headers['content-type']}\r\n\r\n".encode()
        form = BytesParser().parsebytes(head + body)
        fields: dict[str, tuple[str | None, bytes]] = {}
        for part in form.get_payload():
            name = part.get_param("name", header="content-disposition")  # type: ignore[union-attr]
            fields[str(name)] = (part.get_filename(), part.get_payload(decode=True))  # type: ignore[union-attr,assignment]
        return fields

    def upload(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        fields = self.form(body)
        name, content = fields["file"]
        file_id = f"file-{len(self.server.files) + 1}"
        self.server.files[file_id] = (str(name), fields["purpose"][1].decode(), content)
        return 200, {"id": file_id, "object": "file", "filename": name, "bytes": len(content), "purpose": "batch"}

    def list_files(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        found = [
            {"id": key, "filename": name, "bytes": len(content)}
            for key, (name, _, content) in self.server.files.items()
        ]
        return 200, {"object": "list", "data": found[::-1], "has_more": False}

    def content(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        kind, _, batch_id = parts[1].partition("-")
        batch = self.server.batches[batch_id]
        lines = batch.output if kind == "output" else batch.failed
        return 200, "".join(json.dumps(line) + "\n" for line in lines).encode()

    def create(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        asked = json.loads(body)
        server = self.server
        key = self.headers.get("idempotency-key")
        batch_id = f"batch_{len(server.batches) + 1}"
        batch = Batch(batch_id, [], time.time(), key=key, listed_at=time.time() + server.lag)
        batch.anthropic = anthropic
        if anthropic:
            batch.lines = asked["requests"]
        else:
            batch.lines = [json.loads(line) for line in server.files[asked["input_file_id"]][2].splitlines()]
            batch.mark = (asked.get("metadata") or {}).get("batchwright") if server.metadata else None
            batch.file, batch.endpoint = asked["input_file_id"], asked["endpoint"]
            batch.window = asked["completion_window"]
            batch.status = "validating"
            assert len({line["body"].get("model") for line in batch.lines}) == 1
        assert len({line["custom_id"] for line in batch.lines}) == len(batch.lines)
        server.batches[batch_id] = batch
        return 200, self.shown(batch, anthropic)

    def list_batches(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        self.server.advance()
        newest = [*self.server.batches.values()][::-1]
        found = [batch for batch in newest if batch.listed_at <= time.time()]
        after = query.get("after", query.get("after_id"))
        if after is not None:
            at = [batch.id for batch in found].index(after)
            found = found[at + 1 :]
        limit = int(query["limit"])
        shown = [self.shown(batch, anthropic) for batch in found[:limit]]
        return 200, {"object": "list", "data": shown, "has_more": len(found) > limit}

    def retrieve(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        self.server.advance()
        batch = self.server.batches.get(parts[1])
        return (404, {"error": {"message": "no such batch"}}) if batch is None else (200, self.shown(batch, anthropic))

    def cancel(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        batch = self.server.batches.get(parts[1])
        if batch is None:
            return 404, {"error": {"message": "no such batch"}}
        if batch.is_running:
            batch.status = "cancelling"
        return 200, self.shown(batch, anthropic)

    def results(self, parts: list[str], query: dict[str, str], body: bytes, anthropic: bool) -> tuple[int, Any]:
        batch = self.server.batches[parts[1]]
        lines = []
        for line in [*batch.output, *batch.failed]:
            if line["response"] is None:
                kind = "expired" if line["error"]["code"] == "batch_expired" else "canceled"
                result: dict[str, Any] = {"type": kind}
            elif line["response"]["status_code"] == 200:
                result = {"type": "succeeded", "message": line["response"]["body"]}
            else:
                result = {"type": "errored", "error": {"type": "error", "error": line["response"]["body"]["error"]}}
            lines.append({"custom_id": line["custom_id"], "result": result})
        return 200, "".join(json.dumps(line) + "\n" for line in lines).encode()

    def shown(self, batch: Batch, anthropic: bool) -> dict[str, Any]:
        counted = batch.lines[: batch.done]
        if anthropic:
            ended = not batch.is_running
            codes = Counter((line["error"] or {}).get("code") for line in batch.failed)
            expired, cancelled = codes["batch_expired"], codes["batch_cancelled"]
            counts = {
                "processing": 0 if ended else len(batch.lines),
                "succeeded": len(batch.output) if ended else 0,
                "errored": len(batch.failed) - expired - cancelled if ended else 0,
                "expired": expired if ended else 0,
                "canceled": cancelled if ended else 0,
            }
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(batch.created_at))
            status = "ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress"
            return {
                "id": batch.id,
                "type": "message_batch",
                "processing_status": status,
                "request_counts": counts,
                "created_at": when,
                "results_url": f"{self.server.url}/messages/batches/{batch.id}/results" if ended else None,
            }
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "input_file_id": batch.file,
            "completion_window": batch.window,
            "status": batch.status,
            "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
            "output_file_id": f"output-{batch.id}" if batch.output and not batch.is_running else None,
            "error_file_id": f"errors-{batch.id}" if batch.failed and not batch.is_running else None,
            "request_counts": {"total": len(batch.lines), "completed": len(counted), "failed": 0},
            "metadata": None if batch.mark is None else {"batchwright": batch.mark},
            "created_at": int(batch.created_at),
        }

    def send(self, status: int, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):
            super().handle()


@contextmanager
def provider(make: Callable[[], BatchServer] = BatchServer) -> Iterator[BatchServer]:
    """Run a provider on loopback."""
    with make() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
