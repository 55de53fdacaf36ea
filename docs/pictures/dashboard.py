"""Take the pictures of the dashboard: `python docs/pictures/dashboard.py`, about three minutes.

A real service is started with the default model and an empty data folder, given jobs and online requests, and looked at
with headless Chromium. Needs the extras `all`, Pillow and chromium.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.dashboard.browser import Browser

FOLDER = Path(__file__).resolve().parent
SECONDS = 125
"""Of work before the pictures are taken: what the curves show is the last two minutes."""
TOPICS = ("a delayed parcel", "a wrong invoice", "a broken zip", "a late refund", "a lost password", "a missing part")


def main() -> None:
    """Run the command."""
    # What drives the browser is the tests' own, and lies outside this file's folder.
    sys.path.insert(0, str(FOLDER.parents[1]))
    parser = argparse.ArgumentParser(description="Take the pictures of the dashboard.")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER", help="where to write pictures")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of work before; default: %(default)s")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch)
        with _service(data / "data") as url, _browser(data / "profile") as browser:
            _take(browser, url, chosen.to / "dashboard-empty.png", height=900)
            with _online(url):
                failed = _jobs(url, data)
                time.sleep(chosen.seconds)
                _jobs_of_late(url)
                _take(browser, url, chosen.to / "dashboard-light.png")
                _take(browser, url, chosen.to / "dashboard-dark.png", dark=True)
                _take(browser, url, chosen.to / "dashboard-phone.png", width=390)
                _take(browser, url, chosen.to / "dashboard-failed.png", height=900, opened=failed)


@contextmanager
def _service(data: Path) -> Iterator[str]:
    """The address of a service that is ready."""
    command = [sys.executable, "-m", "batchwright", "serve", "--port", "0", "--data", str(data), "--log-format", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "serving":
                # Nobody reads the rest; the pipe must not fill up.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield str(event["url"])
                return
        raise SystemExit(f"the service ended with status {process.wait()}")
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _online(url: str) -> Iterator[None]:
    """Requests of people, about one a second, for as long as this lasts."""
    import httpx

    over = threading.Event()
    drawn = random.Random(1)

    def ask() -> None:
        body = _chat(drawn.choice(TOPICS), 32) | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
            response.read()

    def come() -> None:
        while not over.wait(drawn.expovariate(1.0)):
            threading.Thread(target=ask, daemon=True).start()

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _jobs(url: str, folder: Path) -> str:
    """One of each kind that a list of jobs shows. Returns the id of one with failed lines."""
    ok = [_chat(topic, 24) for topic in TOPICS]
    wrong = [*ok[:4], _chat("x " * 10_000, 24)]
    _batch(url, folder, "faq-2026-07.jsonl", ok)
    failed = _batch(url, folder, "complaints.jsonl", wrong)
    _batch(url, folder, "draft.jsonl", ok, same_ids=True)
    embedded = [{"model": "minilm", "input": f"{topic}, {number}"} for number in range(40) for topic in TOPICS]
    _batch(url, folder, "articles.jsonl", embedded, endpoint="/v1/embeddings")
    _post(url, "/v1/batch/async", {"prompts": ["Say hello.", "Say goodbye."], "max_tokens": 8})
    stopped = _batch(url, folder, "experiment.jsonl", ok * 50)
    _batch(url, folder, "support-tickets-2026-08.jsonl", ok * 1600)
    time.sleep(5)
    _post(url, f"/v1/batches/{stopped}/cancel", {})
    return failed


def _jobs_of_late(url: str) -> None:
    """What came just now."""
    with tempfile.TemporaryDirectory() as folder:
        paused = _batch(url, Path(folder), "nightly-summaries.jsonl", [_chat(topic, 64) for topic in TOPICS] * 300)
    _post(url, f"/v1/batches/{paused}/pause", {})


def _chat(topic: str, tokens: int) -> dict[str, Any]:
    content = f"Write an answer to a customer who complains about {topic}."
    return {"model": "smollm2-135m", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}


def _batch(
    url: str,
    folder: Path,
    name: str,
    bodies: list[dict[str, Any]],
    *,
    endpoint: str = "/v1/chat/completions",
    same_ids: bool = False,
) -> str:
    """The id of a new batch of these requests."""
    import httpx

    path = folder / name
    with path.open("w") as file:
        for number, body in enumerate(bodies, start=1):
            custom_id = "ticket-1" if same_ids else f"ticket-{number}"
            line = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}
            file.write(json.dumps(line) + "\n")
    with path.open("rb") as upload:
        made = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": (name, upload)}, timeout=60)
    batch = {
        "input_file_id": made.raise_for_status().json()["id"],
        "endpoint": endpoint,
        "completion_window": "24h",
        "metadata": {"name": name},
    }
    return str(_post(url, "/v1/batches", batch)["id"])


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    import httpx

    return httpx.post(url + path, json=body, timeout=60).raise_for_status().json()


@contextmanager
def _browser(profile: Path) -> Iterator[Browser]:
    from tests.dashboard.browser import Browser

    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()


def _take(
    browser: Browser,
    url: str,
    path: Path,
    *,
    width: int = 1280,
    height: int = 1180,
    dark: bool = False,
    opened: str | None = None,
) -> None:
    """Take one picture. `opened`: id of a job whose details are open."""
    with browser.page(width=width, height=height, dark=dark) as page:
        page.go(url)
        page.until("document.documentElement.dataset.link === 'live'")
        if opened is not None:
            row = f"[...document.querySelectorAll('.job')].find((row) => row.innerText.includes('{opened}'))"
            page.until(f"{row} !== undefined")
            page.value(f"{row}.querySelector('[data-action=details]').click()")
            page.until("document.querySelectorAll('#details .line').length > 0")
            page.until("document.querySelectorAll('#details .groups li').length > 0")
        # Bars grow into place.
        page.until("document.getAnimations().every((each) => each.playState === 'finished')")
        page.picture(path)
    _shrink(path)


def _shrink(path: Path) -> None:
    """To 256 colors, which a page of few colors does not show."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
