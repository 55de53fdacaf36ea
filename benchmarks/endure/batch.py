"""The batch beside the online clients: created again if it ends before they do."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.endure.clients import CHAT, chat_body

_ENDED = ("completed", "failed", "cancelled", "expired")
_POLL = 1.0


@dataclass
class BatchFigures:
    ended: int = 0
    """Batches whose lines have all been answered."""
    lines: int = 0
    """Lines of those batches."""
    failed: int = 0
    problem: str | None = None
    """Why a batch did not end as expected."""


class Batches:
    """One batch of `lines` lines after another."""

    def __init__(self, url: str, lines: int, seed: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=300)
        self._lines = lines
        self._seed = seed
        self._last = False
        self.figures = BatchFigures()

    def finish(self) -> None:
        """Start no further batch; `run` returns when the present one has ended."""
        self._last = True

    async def run(self) -> None:
        async with self._http:
            file = await self._json("POST", "/v1/files", files={"file": ("lines.jsonl", self._input())}, data=_PURPOSE)
            wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
            while not self._last:
                batch = await self._json("POST", "/v1/batches", json=wanted)
                while batch["status"] not in _ENDED:
                    await asyncio.sleep(_POLL)
                    batch = await self._json("GET", f"/v1/batches/{batch['id']}")
                self._count(batch)

    def _count(self, batch: dict[str, Any]) -> None:
        counts, figures = batch["request_counts"], self.figures
        figures.ended += 1
        figures.lines += counts["completed"]
        figures.failed += counts["failed"]
        if batch["status"] != "completed" or counts["completed"] != self._lines:
            figures.problem = f"{batch['id']} ended as {batch['status']} with {counts}"

    async def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = await self._http.request(method, path, **options)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def _input(self) -> bytes:
        draw = random.Random(self._seed)
        lines = (
            {"custom_id": f"line {number}", "method": "POST", "url": CHAT, "body": chat_body(draw)}
            for number in range(self._lines)
        )
        return "".join(json.dumps(line) + "\n" for line in lines).encode()


_PURPOSE = {"purpose": "batch"}
