"""The page and its files as they are served."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import FastAPI
from fastapi.testclient import TestClient

from batchwright.server.dashboard import page

app = FastAPI()
app.include_router(page.router)
client = TestClient(app)
FOLDER = Path(page.__file__).parent


def addresses() -> list[str]:
    return re.findall(r'(?:src|href)="(/[^"]+)"', client.get("/").text)


def test_the_page_may_run_and_load_only_its_own_files() -> None:
    policy = client.get("/").headers["content-security-policy"]
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    assert {parts[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert parts["frame-ancestors"] == "'none'"
    assert parts["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in policy


def test_the_page_has_no_inline_script_or_style_and_names_no_other_host() -> None:
    text = client.get("/").text
    assert re.findall(r"<script(?![^>]*\bsrc=)", text) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", text) == []
    assert re.findall(r'(?:src|href)="(?!/|#)', text) == []


def test_files_are_kept_for_ever_and_the_page_is_asked_for_again() -> None:
    assert client.get("/").headers["cache-control"] == "no-cache"
    for address in (each for each in addresses() if "/static/" in each):
        answer = client.get(address)
        assert answer.status_code == 200, address
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_whoever_has_the_page_is_told_so() -> None:
    tag = client.get("/").headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        answer = client.get("/", headers={"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


def test_files_of_another_version_and_other_files_are_not_found() -> None:
    script = next(each for each in addresses() if each.endswith("/main.js"))
    *_, digest, _ = script.split("/")
    for address in (script.replace(digest, "0" * 20), f"/dashboard/static/{digest}/%2e%2e%2fpage.py", f"{script}x"):
        assert client.get(address).status_code == 404, address


def test_every_file_is_loaded_by_the_page() -> None:
    loaded = {address.rsplit("/", 1)[1] for address in addresses()}
    assert {path.name for path in (FOLDER / "static").iterdir()} <= loaded


def test_texts_never_become_html() -> None:
    for path in (FOLDER / "static").glob("*.js"):
        unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
        assert re.findall(unsafe, path.read_text()) == [], path.name
