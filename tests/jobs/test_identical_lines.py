"""Identical lines, and lines whose prompts begin alike, sent to an endpoint."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.fakes import by_id, codes, read, text_of
from tests.long_form import examples

from batchwright.clock import ManualClock
from batchwright.jobs.run import run

TOKEN, LEAST, STEP = 4, 1024, 128
"""Bytes of a token, the fewest tokens that are cached, and the steps in which they are."""


class Provider(ThreadingHTTPServer):
    """Answers by what it is asked, and caches the prefixes of the last few prompts, as OpenAI describes it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []
        self.faults: Callable[[dict[str, Any]], int | None] = lambda body: None
        self.capacity = 2
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def counts(self) -> Counter[str]:
        """How often each request was asked."""
        return Counter(json.dumps(body, sort_keys=True) for body in self.asked)

    def cached(self, prompt: str) -> int:
        """The tokens of a prompt that were found in the cache, into which it goes."""
        with self._lock:
            found = max((common(prompt, other) for other in self._cache), default=0) // TOKEN
            prefix = prompt[: LEAST * TOKEN]
            for other in [other for other in self._cache if other.startswith(prefix)]:
                del self._cache[other]
            self._cache[prompt] = None
            if len(self._cache) > self.capacity:
                self._cache.popitem(last=False)
        return 0 if found < LEAST else found // STEP * STEP


def common(one: str, other: str) -> int:
    """Number of characters that two texts have in common at the beginning."""
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "far"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        if (status := self.server.faults(body)) is not None:
            self._send(status, {"error": {"message": "no", "type": "t", "code": "c", "param": None}})
            return
        if self.path.endswith("/embeddings"):
            data = [{"index": 0, "embedding": [1.0]}]
            self._send(200, {"object": "list", "data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}})
            return
        text = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        prompt = json.dumps(body.get("messages", body.get("prompt")))
        message = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        usage: dict[str, Any] = {
            "prompt_tokens": max(1, len(prompt) // TOKEN),
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": self.server.cached(prompt)},
        }
        choice = {"index": 0, "finish_reason": "stop", **message}
        self._send(200, {"id": "x", "object": "o", "model": "m", "choices": [choice], "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("retry-after-ms", "1")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name in the base class
        pass


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def lines(path: Path, *bodies: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def usage(line: dict[str, Any]) -> dict[str, Any]:
    found = line["response"]["body"]["usage"]
    assert isinstance(found, dict)
    return found


def repeated(path: Path, number: int = 30, different: int = 6) -> Path:
    """Lines of which several ask the same, with fields that make no difference."""
    return lines(
        path,
        *(
            {"id": f"l{index}", "prompt": f"p{index % different}", "temperature": 0, "user": f"u{index}"}
            for index in range(number)
        ),
    )


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"backend_concurrency": 1}])
def test_identical_lines_are_asked_once_and_all_answered(
    options: dict[str, Any], tmp_path: Path, provider: Provider
) -> None:
    source = repeated(tmp_path / "in.jsonl")
    report = run(source, tmp_path / "out.jsonl", backend=provider.url, **options)
    results = by_id(tmp_path / "out.jsonl")
    assert len(results) == 30
    assert Counter(body["prompt"] for body in provider.asked) == dict.fromkeys((f"p{index}" for index in range(6)), 1)
    by_text: dict[str, set[int]] = {}
    for index in range(30):
        by_text.setdefault(text_of(results[f"l{index}"]), set()).add(index % 6)
    assert sorted(by_text.values(), key=min) == [{index} for index in range(6)]
    asked = [line for line in results.values() if "deduplicated" not in usage(line)]
    assert len(asked) == 6
    assert all(usage(line)["deduplicated"] is True for line in results.values() if line not in asked)
    assert {usage(line)["completion_tokens"] for line in results.values()} == {2}
    assert (report.succeeded, report.deduplicated) == (30, 24)
    assert (report.prompt_tokens, report.generated_tokens) == (6, 12)
    assert (report.saved_prompt_tokens, report.saved_generated_tokens) == (24, 48)


def test_each_line_is_asked_where_that_is_wanted(tmp_path: Path, provider: Provider) -> None:
    report = run(repeated(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", backend=provider.url, dedupe=False)
    assert (len(provider.asked), report.deduplicated, report.saved_prompt_tokens) == (30, 0, 0)
    assert not any("deduplicated" in usage(line) for line in read(tmp_path / "out.jsonl"))


def test_texts_that_are_drawn_are_asked_each_and_embeddings_once(tmp_path: Path, provider: Provider) -> None:
    vector = {"method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}
    source = lines(
        tmp_path / "in.jsonl",
        *[{"prompt": "drawn"}] * 3,
        *({"custom_id": f"v{number}", **vector} for number in range(3)),
        *[{"prompt": "seed", "seed": 1}] * 3,
    )
    report = run(source, tmp_path / "out.jsonl", backend=provider.url)
    assert Counter(body.get("prompt", body.get("input")) for body in provider.asked) == {"drawn": 3, "a": 1, "seed": 1}
    assert (report.succeeded, report.deduplicated) == (9, 4)
    again = run(source, tmp_path / "greedy.jsonl", backend=provider.url, defaults={"temperature": 0})
    assert again.deduplicated == 6


def test_results_in_a_stream_are_shared_too(tmp_path: Path, provider: Provider) -> None:
    source = repeated(tmp_path / "in.jsonl")
    command = [sys.executable, "-m", "batchwright", "run", str(source), "-o", "-", "--backend", provider.url]
    done = subprocess.run([*command, "--backend-concurrency", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(provider.asked) == 6
    assert len({json.loads(line)["custom_id"] for line in done.stdout.splitlines()}) == 30
    assert "24 lines computed once with others" in " ".join(done.stderr.split())
    done = subprocess.run([*command, "--no-dedupe"], capture_output=True, text=True)
    assert (done.returncode, len(provider.asked)) == (0, 36)


def test_rows_of_a_table_are_shared(tmp_path: Path, provider: Provider) -> None:
    source = tmp_path / "in.csv"
    source.write_text("prompt,n\n" + "".join(f"p{number % 2},{number}\n" for number in range(8)))
    report = run(source, tmp_path / "out.csv", backend=provider.url, defaults={"temperature": 0})
    rows = (tmp_path / "out.csv").read_text().splitlines()
    assert (report.deduplicated, len(provider.asked), len(rows)) == (6, 2, 9)
    assert len({row.split(",")[2] for row in rows[1:]}) == 2


def test_an_error_is_that_lines_alone(tmp_path: Path, provider: Provider) -> None:
    """The next one asks; after two errors each asks for itself, until there is an answer."""
    refusals = [400]
    provider.faults = lambda body: refusals.pop() if body["prompt"] == "p0" and refusals else None
    source = repeated(tmp_path / "in.jsonl", 12, 2)
    report = run(source, tmp_path / "out.jsonl", backend=provider.url)
    assert codes(report) == {"c": 1}
    assert Counter(body["prompt"] for body in provider.asked) == {"p0": 2, "p1": 1}
    provider.asked.clear()
    provider.faults = lambda body: 400
    report = run(source, tmp_path / "bad.jsonl", backend=provider.url)
    assert (codes(report), len(provider.asked)) == ({"c": 12}, 12)


def test_lines_that_failed_get_an_answer_that_there_is(tmp_path: Path, provider: Provider) -> None:
    refusals = [400, 400]
    provider.faults = lambda body: refusals.pop() if refusals else None
    source, output = repeated(tmp_path / "in.jsonl", 6, 1), tmp_path / "out.jsonl"
    first = run(source, output, backend=provider.url)
    asked = len(provider.asked)
    assert (first.failed, first.succeeded) == (2, 4)
    second = run(source, output, backend=provider.url, retry_failed="all")
    assert (second.failed, second.succeeded, second.deduplicated, len(provider.asked)) == (0, 6, 2, asked)


def test_appended_lines_get_answers_of_earlier_runs(tmp_path: Path, provider: Provider) -> None:
    source, output = repeated(tmp_path / "in.jsonl", 6, 3), tmp_path / "out.jsonl"
    run(source, output, backend=provider.url)
    repeated(source, 9, 3)
    for options in ({}, {"ordered": True}):
        provider.asked.clear()
        target = output if not options else tmp_path / "ordered.jsonl"
        report = run(source, target, backend=provider.url, **options)  # type: ignore[arg-type]
        assert len(provider.asked) == (3 if options else 0)
        assert report.succeeded == 9
        assert len(by_id(target)) == 9


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_answered_before_a_kill_is_not_asked_again(ordered: bool, tmp_path: Path, provider: Provider) -> None:
    source, output = repeated(tmp_path / "in.jsonl", 120, 30), tmp_path / "out.jsonl"
    arguments = [str(source), "-o", str(output), "-q", "--backend", provider.url, "--backend-concurrency", "3"]
    arguments += ["--ordered"] if ordered else []
    held = output.with_name("out.jsonl.partial") if ordered else output
    kills = (5, 9, 4)[: examples(2, long=3)]
    for kill_at in (*kills, None):
        before = Counter(provider.counts)
        answered = {text_of(line) for line in read(held)} if held.exists() and held.stat().st_size else set()
        process = subprocess.Popen([sys.executable, "-m", "batchwright", "run", *arguments], stderr=subprocess.PIPE)
        asked = len(provider.asked)

        def fault(body: dict[str, Any], process: Any = process, most: Any = kill_at, asked: int = asked) -> int | None:
            if most is not None and len(provider.asked) - asked >= most:
                process.send_signal(signal.SIGKILL)
            return None

        provider.faults = fault
        _, errors = process.communicate()
        assert process.returncode == (0 if kill_at is None else -signal.SIGKILL), errors.decode()
        again = {name for name, count in provider.counts.items() if count > before[name]}
        assert not answered & {hashlib.sha256(name.encode()).hexdigest() for name in again}
        if kill_at is not None and held.exists():
            # The rest of half a line is cut off by the next run.
            whole = held.read_bytes()
            held.write_bytes(whole[: whole.rfind(b"\n") + 1])
    results = by_id(output)
    assert len(results) == 120
    texts = {(int(name[1:]) % 30, text_of(line)) for name, line in results.items()}
    assert len(texts) == len({text for _, text in texts}) == 30
    # Only requests in flight at one of the kills were asked more than once.
    assert sum(provider.counts.values()) - 30 <= len(kills) * 4


SYSTEM = [f"You are number {number}. " + "Say what is so. " * 300 for number in range(6)]


def chats(path: Path, system: list[str] = SYSTEM, each: int = 5) -> Path:
    return lines(
        path,
        *(
            {"id": f"{index}/{number}", "messages": [{"role": "system", "content": text}, user(f"q{number}")]}
            for number in range(each)
            for index, text in enumerate(system)
        ),
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_prompts_that_begin_alike_follow_each_other(tmp_path: Path, provider: Provider) -> None:
    report = run(chats(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", backend=provider.url, backend_concurrency=1)
    order = [body["messages"][0]["content"] for body in provider.asked]
    assert order == [text for text in SYSTEM for _ in range(5)]
    assert [body["messages"][1]["content"] for body in provider.asked] == [f"q{number}" for number in range(5)] * 6
    cached = [usage(line)["prompt_tokens_details"]["cached_tokens"] for line in read(tmp_path / "out.jsonl")]
    assert [bool(tokens) for tokens in cached] == [False, True, True, True, True] * 6
    assert report.cached_tokens == sum(cached)
    assert 0.7 < report.cached_share == report.cached_tokens / report.prompt_tokens < 0.8


def test_the_first_with_a_prefix_goes_alone(tmp_path: Path, provider: Provider) -> None:
    """Every other is found in the cache, however many may be sent at once."""
    provider.capacity = 6
    clock = ManualClock()  # on which nothing waits for too long
    report = run(chats(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", backend=provider.url, clock=clock)
    missed = [
        line["custom_id"]
        for line in read(tmp_path / "out.jsonl")
        if not usage(line)["prompt_tokens_details"]["cached_tokens"]
    ]
    assert sorted(missed) == [f"{index}/0" for index in range(6)]
    assert report.succeeded == 30


def test_short_prompts_stay_in_order(tmp_path: Path, provider: Provider) -> None:
    short = [text[:2000] for text in SYSTEM]
    run(chats(tmp_path / "in.jsonl", short), tmp_path / "out.jsonl", backend=provider.url, backend_concurrency=1)
    assert [body["messages"][0]["content"] for body in provider.asked] == short * 5


def test_the_order_of_the_input_is_kept_where_that_is_wanted(tmp_path: Path, provider: Provider) -> None:
    source, output = chats(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    run(source, output, backend=provider.url, backend_concurrency=1, planned=False)
    assert [body["messages"][0]["content"] for body in provider.asked] == SYSTEM * 5


def test_lines_with_a_priority_come_first(tmp_path: Path, provider: Provider) -> None:
    source = chats(tmp_path / "in.jsonl", SYSTEM[:2], 3)
    with source.open("a") as file:
        for priority in (9, 1):
            message = {"messages": [{"role": "system", "content": SYSTEM[0]}, user(f"urgent {priority}")]}
            file.write(json.dumps({**message, "priority": priority}) + "\n")
    run(source, tmp_path / "out.jsonl", backend=provider.url, backend_concurrency=1)
    said = [body["messages"][1]["content"] for body in provider.asked]
    assert (said[0], said[-1], len(said)) == ("urgent 1", "urgent 9", 8)
