"""Headless Chromium, driven over the DevTools protocol through a pair of pipes: no port, no library.

Everything waits for a condition, at most `PATIENCE` seconds.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 30.0
"""Seconds to wait for something that should happen."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--lang=en",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# The protocol is spoken on the descriptors 3 and 4.
_LAUNCH = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"

Event = dict[str, Any]


class BrowserError(Exception):
    """A command that the browser refused, or a wait that timed out."""


class Browser:
    """A process of Chromium, whose pages each have their own cookies, storage and downloads."""

    def __init__(self, profile: Path) -> None:
        if CHROMIUM is None:
            raise BrowserError("there is no chromium on this machine: install the package chromium")
        reads, self._commands = _pipe()
        self._answers, writes = _pipe()
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        flags = [*_FLAGS, *sandbox, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(reads), str(writes), CHROMIUM, *flags, "about:blank"],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, queue.SimpleQueue[Event]] = {}
        self._listeners: dict[str | None, list[Callable[[Event], None]]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises `BrowserError`."""
        answer: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with self._lock:
            self._last += 1
            number = self._last
            self._waiting[number] = answer
            message = {"id": number, "method": method, "params": params}
            if session is not None:
                message["sessionId"] = session
            os.write(self._commands, json.dumps(message).encode() + b"\0")
        try:
            got = answer.get(timeout=PATIENCE)
        except queue.Empty:
            raise BrowserError(f"{method}: no answer after {PATIENCE:g} s") from None
        if "error" in got:
            raise BrowserError(f"{method}: {got['error']['message']}")
        result: dict[str, Any] = got["result"]
        return result

    def listen(self, session: str | None, listener: Callable[[Event], None]) -> None:
        """Have `listener` called, on the reading thread, with every event of a session (None: of the browser)."""
        self._listeners.setdefault(session, []).append(listener)

    @contextmanager
    def page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Page]:
        """Open a page in a context of its own."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        page.resize(width, height)
        page.emulate("prefers-color-scheme", "dark" if dark else "light")
        try:
            yield page
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        try:
            self.send("Browser.close")
            self._process.wait(PATIENCE)
        except (BrowserError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        self._reader.join(PATIENCE)
        os.close(self._answers)

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in messages:
                self._hear(json.loads(message))

    def _hear(self, message: Event) -> None:
        if (number := message.get("id")) is not None:
            if (waiting := self._waiting.pop(number, None)) is not None:
                waiting.put(message)
            return
        for listener in self._listeners.get(message.get("sessionId"), ()):
            listener(message)


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.browser = browser
        self.context = context
        self.requests: list[str] = []
        """Addresses that the page requested, in order."""
        self.complaints: list[str] = []
        """Errors and warnings of the page's console, uncaught exceptions, and violations of its policies."""
        self._session = session
        self._media: dict[str, str] = {}
        self._downloads: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._names: dict[str, str] = {}
        browser.listen(session, self._hear)
        browser.listen(None, self._hear_download)
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self._session, **params)

    def go(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Set the size of the page in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def emulate(self, feature: str, value: str) -> None:
        """Emulate a media feature such as `prefers-color-scheme`."""
        self._media[feature] = value
        features = [{"name": name, "value": chosen} for name, chosen in self._media.items()]
        self.send("Emulation.setEmulatedMedia", features=features)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise. Raises `BrowserError` when it throws."""
        got = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in got:
            details = got["exceptionDetails"]
            raise BrowserError(f"{expression}: {details.get('exception', {}).get('description', details['text'])}")
        return got["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until the expression is true, also across a navigation; one that throws counts as false."""
        look = f"""new Promise((resolve) => {{
            const end = Date.now() + {PATIENCE * 900};
            const look = () => {{
                let found = false;
                try {{ found = Boolean({expression}); }} catch {{ }}
                if (found || Date.now() > end) resolve(found); else setTimeout(look, 10);
            }};
            look();
        }})"""
        try:
            got = self.value(look)
        except BrowserError as error:
            if "navigated" not in str(error):
                raise
            got = self.value(look)
        if not got:
            shown = self.value("document.body.innerText")
            raise BrowserError(f"never came true: {expression}\non the page:\n{shown}\ncomplaints: {self.complaints}")

    def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        chosen = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{chosen} !== null")
        return str(self.value(f"{chosen}.innerText"))

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse, once it is visible and enabled."""
        chosen = json.dumps(selector)
        self.until(f"document.querySelector({chosen}).checkVisibility()")
        self.until(f"document.querySelector({chosen}).ariaDisabled !== 'true'")
        x, y = self.value(f"""(() => {{
            const node = document.querySelector({chosen});
            node.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key of the keyboard: Tab, Enter, Escape, Space."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32}[key]
        text = {"Enter": "\r", "Space": " "}.get(key)
        common = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        self.send(
            "Input.dispatchKeyEvent",
            type="keyDown" if text else "rawKeyDown",
            **common,
            **({"text": text} if text else {}),
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, *files: Path) -> None:
        """Choose files in an `<input type="file">`."""
        node = self.send("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")
        self.send("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=node["result"]["objectId"])

    def drop(self, *files: Path) -> None:
        """Drag files from outside the browser to the middle of the page, and let go."""
        data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=300, y=300, data=data)

    def download(self, folder: Path, act: Callable[[], None]) -> Path:
        """Return the file that `act` makes the page download."""
        self.browser.send(
            "Browser.setDownloadBehavior",
            behavior="allowAndName",
            downloadPath=str(folder),
            browserContextId=self.context,
            eventsEnabled=True,
        )
        act()
        try:
            guid, name = self._downloads.get(timeout=PATIENCE)
        except queue.Empty:
            raise BrowserError(f"nothing was downloaded; complaints: {self.complaints}") from None
        return (folder / guid).rename(folder / name)

    def picture(self, path: Path, *, height: int | None = None) -> None:
        """Return a PNG of the visible part, or of the first `height` pixels of the page."""
        width = self.value("innerWidth")
        clip = {} if height is None else {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        got = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=height is not None, **clip)
        path.write_bytes(base64.b64decode(got["data"]))

    def hosts(self) -> set[str]:
        """Return the hosts that the page sent requests to."""
        return {urlsplit(each).netloc for each in self.requests if not each.startswith(("blob:", "data:", "about:"))}

    def _hear(self, event: Event) -> None:
        params = event["params"]
        match event["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str([each.get("value") for each in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                entry = params["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def _hear_download(self, event: Event) -> None:
        params = event["params"]
        if event["method"] == "Browser.downloadWillBegin":
            self._names[params["guid"]] = params["suggestedFilename"]
        elif event["method"] == "Browser.downloadProgress" and params["state"] == "completed":
            # Every page is told of all downloads.
            self._downloads.put((params["guid"], self._names[params["guid"]]))


def _pipe() -> tuple[int, int]:
    """Return a pipe with descriptors above those that the protocol uses in the child."""
    ends = os.pipe()
    raised = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return raised[0], raised[1]
