"""A Hugging Face hub for tests: one dataset repository, over the part of its HTTP API that `HfFileSystem` uses."""

from __future__ import annotations

import base64
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "someone/answers"
_API = re.compile(rf"/api/datasets/{REPOSITORY}(?:/([a-z-]+)/main(?:/(.*))?)?")
_FILE = re.compile(rf"/datasets/{REPOSITORY}/resolve/main/(.*)")


@dataclass
class Hub:
    """The files of the repository by path."""

    address: str
    token: str
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0
    faults: float = 0.0
    """Share of the requests that are answered with 503."""
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def tree(self, folder: str, *, recursive: bool) -> list[dict[str, Any]]:
        """What is in a folder; empty if there is no such folder."""
        prefix = f"{folder}/" if folder else ""
        inside = [path for path in sorted(self.files) if path.startswith(prefix)]
        found = {}
        for path in inside:
            name, *deeper = path.removeprefix(prefix).split("/")
            if not deeper or recursive:
                found[path] = self.described(path)
            if deeper:
                found.setdefault(prefix + name, self.described(prefix + name))
        return [*found.values()]

    def described(self, path: str) -> dict[str, Any]:
        if path not in self.files:
            return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
        content = self.files[path]
        return {"type": "file", "path": path, "oid": sha1(content).hexdigest(), "size": len(content)}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        self.commits += 1
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                self.files.pop(value["path"], None)
            elif line["key"] == "deletedFolder":
                self.files = {path: each for path, each in self.files.items() if not path.startswith(value["path"])}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    """An answer is written at once."""
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def answer(self, body: bytes) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        hub = self.server.hub
        if hub.chance.random() < hub.faults:
            self.refuse(503, "")
        elif self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.refuse(401, "RepoNotFound")
        elif (found := _FILE.fullmatch(path)) is not None:
            self.send_file(found[1])
        elif (found := _API.fullmatch(path)) is not None:
            self.answer_api(found[1], found[2] or "", parse_qs(url.query), body)
        else:
            self.refuse(404, "RepoNotFound")

    def answer_api(self, kind: str | None, path: str, query: dict[str, list[str]], body: bytes) -> None:
        hub = self.server.hub
        if kind in (None, "revision"):
            self.send_json({"id": REPOSITORY, "sha": "0" * 40, "siblings": [], "private": True, "tags": []})
        elif kind == "tree":
            found = hub.tree(path, recursive=query.get("recursive", ["False"])[0].lower() == "true")
            if found or not path:
                self.send_json(found)
            else:
                self.refuse(404, "EntryNotFound")
        elif kind == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            there = [each for each in paths if each in hub.files or hub.tree(each, recursive=False)]
            self.send_json([hub.described(each) for each in there])
        elif kind == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            self.send_json({"files": modes})
        elif kind == "commit":
            hub.commit([json.loads(line) for line in body.splitlines()])
            oid = f"{hub.commits:040x}"
            self.send_json({"commitUrl": f"{hub.address}/datasets/{REPOSITORY}/commit/{oid}", "commitOid": oid})
        else:
            self.refuse(404, "")

    def send_file(self, path: str) -> None:
        files = self.server.hub.files
        if path not in files:
            self.refuse(404, "EntryNotFound")
            return
        content = files[path]
        wanted = self.headers.get("Range", "")
        self.send_response(206 if wanted else 200)
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            total, content = len(content), content[int(first) : int(last or len(content)) + 1]
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{total}")
        self.end(content)

    def send_json(self, value: object) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end(json.dumps(value).encode())

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.end(b"")

    def end(self, content: bytes) -> None:
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def hub_server(token: str = "hf_known") -> Iterator[Hub]:
    """A hub on loopback, whose repository is private."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}", token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
