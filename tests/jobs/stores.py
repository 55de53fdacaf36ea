"""Stores for tests: an S3 of moto, an HTTP server with ranges, and a file system that fails now and then."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFileSystem


@contextmanager
def http_server(folder: Path, *, ranges: bool = True, faults: float = 0.0) -> Iterator[str]:
    """The address of a server of the files in `folder`; `faults`: share of the answers that are 500, 503 or broken."""
    chance = random.Random(1)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = folder / self.path.partition("?")[0].lstrip("/")
            fault = chance.random() / faults if faults else 1.0
            if not path.is_file() or fault < 0.6:
                self.send_error(404 if not path.is_file() else (500 if fault < 0.3 else 503))
                return
            content = path.read_bytes()
            wanted = self.headers.get("Range", "") if ranges else ""
            self.send_response(206 if wanted else 200)
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                total = len(content)
                content = content[int(first) : int(last) + 1]
                self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{total}")
            if ranges:
                self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content if fault >= 1.0 else content[: len(content) // 2])
            if fault < 1.0:
                self.close_connection = True  # in the middle of the answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """`faulty://`: objects in memory; every so many requests fail, in turn as stores do."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    every: ClassVar[int] = 3
    requests: ClassVar[int] = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped = MemoryFileSystem._strip_protocol(path.replace("faulty://", "memory://"))
        assert isinstance(stripped, str)
        return stripped

    def _fail_now_and_then(self) -> None:
        cls = type(self)
        cls.requests += 1
        if cls.requests % cls.every == 0:
            faults: list[Exception] = [
                OSError(errno.EIO, "500 Internal Server Error"),
                OSError(errno.EBUSY, "503 Slow Down"),
                TimeoutError("too slow"),
                ConnectionResetError(errno.ECONNRESET, "reset"),
            ]
            raise faults[cls.requests // cls.every % len(faults)]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self._fail_now_and_then()
        return bytes(super().cat_file(path, start, end, **options))

    def info(self, path: str, **options: Any) -> Any:
        self._fail_now_and_then()
        return super().info(path, **options)

    def rm_file(self, path: str) -> None:
        self._fail_now_and_then()
        super().rm_file(path)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self._fail_now_and_then()
        super().mv(path1, path2, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode in ("wb", "xb"):
            self._fail_now_and_then()
        return super()._open(path, mode, **options)
