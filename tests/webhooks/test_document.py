"""docs/webhooks.md is true: its examples take what the service signs, its figures are those of the code."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError
from standardwebhooks.webhooks import WebhookVerificationError
from typer.main import get_command

from batchwright.cli import webhooks
from batchwright.service.webhooks import courier, signing
from batchwright.service.webhooks.courier import event_body
from batchwright.service.webhooks.sender import Sender
from batchwright.store.records import Delivery

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "webhooks.md").read_text(encoding="utf-8")
WORDS = " ".join(TEXT.split())
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BATCH = Delivery("dlv_1", "evt_1", "default", "batch.completed", "batch_1", 1_785_585_605.5, "https://x", None, 0)


@pytest.mark.parametrize("example", EXAMPLES, ids=["openai", "standardwebhooks"])
def test_an_example_takes_what_is_signed_and_refuses_the_rest(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = signing.new_secret()
    monkeypatch.setenv("WEBHOOK_SECRET", secret)
    names: dict[str, Any] = {}
    exec(example, names)
    body = event_body(BATCH)
    headers = signing.signed_headers([secret], message_id="evt_1", timestamp=int(time.time()), body=body)
    assert names["receive"](body, headers) == "batch_1: batch.completed"
    with pytest.raises((InvalidWebhookSignatureError, WebhookVerificationError)):
        names["receive"](body + b" ", headers)


def test_the_body_is_the_one_that_is_shown() -> None:
    [shown] = re.findall(r"```json\n(.*?)\n```", TEXT)
    assert re.sub(r"[0-9a-f]{4}…", "1", shown) == event_body(BATCH).decode()


def test_the_figures_are_those_of_the_code() -> None:
    assert "300 seconds" in WORDS
    assert "for 72 hours" in WORDS
    assert courier.GIVE_UP_AFTER == 72 * 3600
    pauses = [courier.next_try(created_at=0, tries=tries, now=0, luck=0.5) for tries in (0, 1, 2, 50)]
    assert pauses == [5, 15, 45, 6 * 3600]
    assert "5 s, 15 s, 45 s and so on, up to 6 hours apart" in WORDS
    assert "within 15 seconds" in WORDS
    assert inspect.signature(Sender).parameters["timeout"].default == 15


def test_every_command_is_there_and_all_are_told() -> None:
    told = set(re.findall(r"webhooks (\w+)", TEXT)) | set(re.findall(r"`(\w+)`", TEXT))
    there: set[str] = set(getattr(get_command(webhooks.app), "commands"))  # noqa: B009  typer's own kind of group
    assert there <= told
    assert set(re.findall(r"batchwright webhooks (\w+)", TEXT)) <= there


def test_lines_are_not_wider_than_the_page() -> None:
    assert max(map(len, TEXT.splitlines())) <= 120
