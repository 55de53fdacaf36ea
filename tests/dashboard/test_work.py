"""From the file to its results, in a real browser against the real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.dashboard.browser import Browser, Page
from tests.dashboard.service import Service
from tests.server.fakes import MODEL


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path / "data")
    service.start()
    yield service
    service.stop()


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    """A live page, which must end without complaints and without requests to other hosts."""
    with browser.page() as page:
        page.go(service.url)
        page.until("document.documentElement.dataset.link === 'live'")
        yield page
        assert page.hosts() == {urlsplit(service.url).netloc}
        assert page.complaints == []


def written(path: Path, prompts: list[str], **changes: object) -> Path:
    lines = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": prompt}]},
        }
        | changes
        for number, prompt in enumerate(prompts, start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def status(text: str, nth: int = 1) -> str:
    return f"document.querySelector('.job:nth-child({nth}) .badge').innerText.includes('{text}')"


def button(name: str, nth: int = 1) -> str:
    return f".job:nth-child({nth}) [data-action={name}]"


def answers(path: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


@pytest.mark.parametrize("by", ["input", "drop"])
def test_a_file_is_uploaded_completed_and_downloaded(page: Page, tmp_path: Path, by: str) -> None:
    file = written(tmp_path / "questions.jsonl", ["one day", "two days", "three days"])
    if by == "input":
        page.choose("#file-input", file)
    else:
        page.drop(file)
    page.until(status("Completed"))
    assert "questions.jsonl" in page.text(".job h3")
    assert "3 of 3 lines" in page.text(".job .progress")
    page.until("document.querySelectorAll('.upload').length === 0")
    output = page.download(tmp_path, lambda: page.click(button("output")))
    assert answers(output) == {"request-1": "ONE DAY", "request-2": "TWO DAYS", "request-3": "THREE DAYS"}


def test_the_example_of_the_empty_page_completes(page: Page) -> None:
    page.click("#try-example")
    page.until(status("Completed"))
    assert "3 of 3 lines" in page.text(".job .progress")


def test_progress_is_shown_while_it_runs_and_it_can_be_paused(page: Page, service: Service, tmp_path: Path) -> None:
    service.hold()
    page.choose("#file-input", written(tmp_path / "slow.jsonl", ["a"] * 5))
    page.until(status("In progress"))
    assert "0 of 5 lines" in page.text(".job .progress")
    page.click(button("pause"))
    page.until(status("Paused"))
    page.click(button("resume"))
    page.until(status("In progress"))
    service.release()
    page.until(status("Completed"))


def test_cancelling_asks_first_and_keeps_what_is_done(page: Page, service: Service, tmp_path: Path) -> None:
    service.hold()
    page.choose("#file-input", written(tmp_path / "long.jsonl", ["a"] * 3))
    page.until(status("In progress"))
    page.click(button("cancel"))
    page.until("document.querySelector('#cancel-dialog').open")
    page.click("#cancel-dialog [value=keep]")
    page.until("!document.querySelector('#cancel-dialog').open")
    assert page.value(status("In progress"))
    page.click(button("cancel"))
    page.click("#cancel-dialog [value=cancel]")
    page.until(status("Cancelled"))


def test_failed_lines_are_explained_and_tried_again(page: Page, service: Service, tmp_path: Path) -> None:
    page.choose("#file-input", written(tmp_path / "mixed.jsonl", ["good", "fail here"]))
    page.until(status("Completed with errors"))
    page.click(button("details"))
    page.until("document.querySelector('#details .groups').innerText.includes('line 2, request-2')")
    assert page.text("#details [data-part=plan]").split("\n")[:2] == ["Shared with earlier prompts", "0%"]
    assert "the stub was asked to fail" in page.text("#details .groups")
    page.press("Escape")
    errors = page.download(tmp_path, lambda: page.click(button("errors")))
    assert [json.loads(line)["custom_id"] for line in errors.read_text().splitlines()] == ["request-2"]
    page.click(button("retry"))
    page.until("document.querySelectorAll('.job').length === 2")
    page.until(status("Completed with errors"))
    assert "1 of 1 line" in page.text(".job .progress")
    assert "retry" in page.text(".job .what")
    assert "tried again as batch_" in page.text("#messages")


def test_a_file_that_fails_validation_is_explained_by_line(page: Page, tmp_path: Path) -> None:
    file = written(tmp_path / "broken.jsonl", ["a", "b"])
    file.write_text(file.read_text() + '{"custom_id": "request-1"\n')
    page.choose("#file-input", file)
    page.until("document.querySelector('.upload .problems').innerText.includes('Line 3')")
    page.until(status("Failed validation"))
    page.click(button("details"))
    page.until("document.querySelector('#details').innerText.includes('Line 3')")
    page.press("Escape")
    page.click(".upload [data-action=dismiss]")
    page.until("document.querySelectorAll('.upload').length === 0")


def test_a_file_that_is_no_input_is_refused_before_it_is_sent(page: Page, tmp_path: Path) -> None:
    page.choose("#file-input", written(tmp_path / "other.jsonl", ["a"], url="/v1/images"))
    page.until("document.querySelector('.upload').innerText.includes('Line 1')")
    assert not any("/v1/files" in each for each in page.requests)


def test_the_keyboard_is_enough(page: Page, service: Service, tmp_path: Path) -> None:
    focused = "document.activeElement"

    def tab_to(condition: str) -> None:
        for _ in range(30):
            page.press("Tab")
            if page.value(f"{focused}.matches({json.dumps(condition)})"):
                assert page.value(f"getComputedStyle({focused}).outlineStyle !== 'none'") or page.value(
                    f"{focused}.matches('.unseen')"
                )
                return
        raise AssertionError(f"Tab never came to {condition}")

    service.hold()
    page.choose("#file-input", written(tmp_path / "keys.jsonl", ["a", "b"]))
    page.until(status("In progress"))
    page.value("document.activeElement.blur()")
    tab_to(".skip")
    page.press("Enter")
    page.until(f"{focused}.id === 'jobs'")
    tab_to("#file-input")
    tab_to("[data-action=details]")
    page.press("Enter")
    page.until("document.querySelector('#details').open")
    page.press("Escape")
    page.until(f"{focused}.matches('[data-action=details]')")
    tab_to("[data-action=pause]")
    page.press("Space")
    page.until(status("Paused"))
    page.until(f"{focused}.closest('.job') !== null")
    tab_to("[data-action=cancel]")
    page.press("Enter")
    page.until(f"{focused}.value === 'keep'")
    page.press("Tab")
    page.press("Enter")
    page.until(status("Cancelled"))


def test_a_key_is_asked_for_and_kept_in_the_tab_only(browser: Browser, service: Service, tmp_path: Path) -> None:
    _, key = service.call(lambda: service.services.keys.create("browser"))
    with browser.page() as page:
        page.go(service.url)
        page.until("document.querySelector('#key-dialog').open")
        page.type("not-the-key")
        page.press("Enter")
        page.until("document.querySelector('#key-wrong').textContent.includes('did not accept')")
        page.until("document.querySelector('#key-dialog').open")
        page.type(key)
        page.press("Enter")
        page.until("document.documentElement.dataset.link === 'live'")
        page.choose("#file-input", written(tmp_path / "mine.jsonl", ["with a key"]))
        page.until(status("Completed"))
        output = page.download(tmp_path, lambda: page.click(button("output")))
        assert answers(output) == {"request-1": "WITH A KEY"}
        assert page.value("JSON.stringify(Object.values(localStorage))") == "[]"
        assert page.value("document.cookie") == ""
        assert all(key not in address for address in page.requests)
        page.click("#forget-key")
        page.until("document.querySelector('#key-dialog').open")
        assert page.value("sessionStorage.length") == 0
        page.press("Escape")
        page.until("document.documentElement.dataset.link === 'locked'")
        assert "An API key is needed" in page.text("#banner")
        page.click("#banner button")
        page.until("document.querySelector('#key-dialog').open")
        page.type(key)
        page.press("Enter")
        page.until("document.documentElement.dataset.link === 'live'")
        assert [each for each in page.complaints if "401" not in each] == []


def test_jobs_of_the_simple_endpoints_are_shown_and_cancelled(page: Page, service: Service) -> None:
    service.hold()
    page.value("""fetch("/v1/batch/async", {
        method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({prompts: ["a", "b"]}),
    }).then((response) => response.status)""")
    page.until(status("In progress"))
    page.click(button("cancel"))
    page.click("#cancel-dialog [value=cancel]")
    page.until(status("Cancelled"))


def test_it_fits_a_phone_while_it_works(browser: Browser, service: Service, tmp_path: Path) -> None:
    with browser.page(width=360, height=740) as page:
        page.go(service.url)
        page.until("document.documentElement.dataset.link === 'live'")
        page.choose("#file-input", written(tmp_path / f"{'long-name-' * 8}.jsonl", ["a", "fail"]))
        page.until(status("Completed with errors"))
        page.click(button("details"))
        page.until("document.querySelector('#details').innerText.includes('request-2')")
        for element in ("document.documentElement", "document.querySelector('#details')"):
            assert page.value(f"{element}.scrollWidth <= {element}.clientWidth"), element


def table(path: Path) -> Path:
    rows = [
        "name,review",
        "A,good stuff",
        "B,",
        'C,"bad, really"',
        *(f"D{number},plain {number}" for number in range(40)),
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def fill(selector: str, text: str) -> str:
    return f"document.querySelector('{selector}').value = {json.dumps(text)}"


def test_a_table_becomes_a_batch_and_its_answers_are_read_and_searched(page: Page, tmp_path: Path) -> None:
    page.choose("#file-input", table(tmp_path / "reviews.csv"))
    page.until("document.activeElement.name === 'prompt_template'")
    page.type("say ")
    page.click(".chips button:nth-child(2)")
    assert page.value("document.querySelector('[name=prompt_template]').value") == "say {review}"
    page.click(".template-form .solid")
    page.until(status("Completed"))
    assert "reviews.csv" in page.text(".job h3")
    page.until("document.querySelector('#messages').innerText.includes('1 row has nothing')")
    page.click(button("details"))
    page.until("document.querySelectorAll('#details .line').length === 20")
    assert "say good stuff" in page.text("#details .line:nth-child(1)")
    assert "SAY GOOD STUFF" in page.text("#details .line:nth-child(1)")
    page.click("#details [data-action=next]")
    page.until("document.querySelector('#details').innerText.includes('Lines 21 to 40 of 42')")
    page.click("#details [data-action=next]")
    page.until("document.querySelectorAll('#details .line').length === 2")
    page.click("#details [data-action=previous]")
    page.until("document.querySelectorAll('#details .line').length === 20")
    page.value(fill("#find-text", "REALLY"))
    page.click("#details .find button")
    page.until("document.querySelectorAll('#details .line').length === 1")
    assert "say bad, really" in page.text("#details .line")
    page.value(fill("#find-text", "nowhere"))
    page.click("#details .find button")
    page.until("document.querySelector('#details').innerText.includes('No line is like that')")
    # The table itself is not kept: only its requests and the answers are.
    listed = page.value("fetch('/v1/files').then((answer) => answer.json())")
    assert sorted(each["filename"].partition(".")[2] for each in listed["data"])[0].endswith("jsonl")
    assert not any(each["filename"] == "reviews.csv" for each in listed["data"])


def test_a_template_with_a_wrong_column_can_be_mended(page: Page, tmp_path: Path) -> None:
    page.choose("#file-input", table(tmp_path / "reviews.csv"))
    page.until("document.activeElement.name === 'prompt_template'")
    page.type("say {revew}")
    page.click(".template-form .solid")
    page.until("document.querySelector('.upload .said').innerText.includes(\"no column 'revew'\")")
    assert all("400" in each for each in page.complaints)  # the browser's own note of the answer
    page.complaints.clear()
    page.value(fill("[name=prompt_template]", "say {review}"))
    page.click(".template-form .solid")
    page.until(status("Completed"))
    page.until("document.querySelectorAll('.upload').length === 0")


def test_prompts_are_sent_as_they_are(page: Page, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    page.choose("#file-input", prompts)
    page.click(".template-form .solid")
    page.until(status("Completed"))
    page.click(button("details"))
    page.until("document.querySelector('#details .preview').innerText.includes('TWO')")


def test_answers_come_into_the_open_preview_while_the_job_runs(page: Page, service: Service, tmp_path: Path) -> None:
    service.hold()
    page.choose("#file-input", written(tmp_path / "slow.jsonl", ["one", "two"]))
    page.until(status("In progress"))
    page.click(button("details"))
    page.until("document.querySelectorAll('#details .line').length === 2")
    assert "ONE" not in page.text("#details .preview")
    service.release()
    page.until("document.querySelector('#details .preview').innerText.includes('ONE')")


def test_an_array_of_requests_is_sent_as_lines(page: Page, tmp_path: Path) -> None:
    lines = written(tmp_path / "lines.jsonl", ["one", "two"]).read_text().splitlines()
    array = tmp_path / "array.json"
    array.write_text(f"[{','.join(lines)}]")
    page.choose("#file-input", array)
    page.until(status("Completed"))
    assert "2 of 2 lines" in page.text(".job .progress")
