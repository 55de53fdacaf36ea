"""Signatures, checked by the packages that receivers use."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import InvalidWebhookSignatureError, OpenAI
from openai.types.webhooks import BatchCompletedWebhookEvent
from standardwebhooks import Webhook as StandardWebhook
from standardwebhooks.webhooks import WebhookVerificationError

from batchwright.errors import InvalidRequest
from batchwright.service.webhooks.courier import event_body
from batchwright.service.webhooks.signing import BadSignature, new_secret, secret_bytes, sign, signed_headers, verify
from batchwright.store.records import Delivery

SECRETS = st.binary(min_size=24, max_size=64).map(lambda key: "whsec_" + base64.b64encode(key).decode())
DELIVERY = Delivery("del_1", "evt_1", "default", "batch.completed", "batch_1", 1_700_000_000.9, "https://x", None, 0)


def now() -> int:
    return int(time.time())


@given(SECRETS, st.text(min_size=1), st.text())
def test_standardwebhooks_makes_the_same_signature(secret: str, message_id: str, body: str) -> None:
    stamp = datetime(2026, 8, 1, 12, 0, 5, tzinfo=UTC)
    theirs = StandardWebhook(secret).sign(message_id, stamp, body)
    ours = sign([secret], message_id=message_id, timestamp=int(stamp.timestamp()), body=body.encode())
    assert ours == theirs


def test_the_signature_of_the_specification() -> None:
    """Its example, with a key of our own: HMAC-SHA256 of id.timestamp.body."""
    secret = "whsec_" + base64.b64encode(b"k" * 24).decode()
    right = base64.b64encode(hmac.new(b"k" * 24, b'msg_1.1614265330.{"test": 1}', hashlib.sha256).digest()).decode()
    assert sign([secret], message_id="msg_1", timestamp=1614265330, body=b'{"test": 1}') == f"v1,{right}"


def test_both_packages_accept_each_secret_while_one_rotates() -> None:
    body = event_body(DELIVERY)
    old, new = new_secret(), new_secret()
    headers = signed_headers([new, old], message_id=DELIVERY.event_id, timestamp=now(), body=body)
    assert headers["webhook-signature"].count("v1,") == 2
    for secret in (old, new):
        assert StandardWebhook(secret).verify(body, headers)["id"] == "evt_1"
        event = OpenAI(api_key="none", webhook_secret=secret).webhooks.unwrap(body, headers)
        assert isinstance(event, BatchCompletedWebhookEvent)
        assert (event.data.id, event.created_at, event.object) == ("batch_1", 1_700_000_000, "event")
        verify(secret, headers, body, now=now())


def test_all_refuse_another_secret_and_an_old_timestamp() -> None:
    body = event_body(DELIVERY)
    secret = new_secret()
    for wrong, age in ((new_secret(), 0), (secret, 301)):
        headers = signed_headers([secret], message_id="evt_1", timestamp=now() - age, body=body)
        with pytest.raises(WebhookVerificationError):
            StandardWebhook(wrong).verify(body, headers)
        with pytest.raises(InvalidWebhookSignatureError):
            OpenAI(api_key="none").webhooks.unwrap(body, headers, secret=wrong)
        with pytest.raises(BadSignature):
            verify(wrong, headers, body, now=now())


@pytest.mark.parametrize("age", [-300, 0, 300])
def test_the_tolerance_is_300_seconds_either_way(age: int) -> None:
    secret = new_secret()
    verify(secret, signed_headers([secret], message_id="m", timestamp=1000, body=b"{}"), b"{}", now=1000 + age)
    with pytest.raises(BadSignature, match="within 300 s"):
        verify(secret, signed_headers([secret], message_id="m", timestamp=1000, body=b"{}"), b"{}", now=1301)


@pytest.mark.parametrize("changed", ["webhook-id", "webhook-timestamp", "webhook-signature", "body"])
def test_whatever_is_changed_is_noticed(changed: str) -> None:
    secret, body = new_secret(), b'{"a":1}'
    headers = signed_headers([secret], message_id="evt_1", timestamp=1000, body=body)
    if changed == "body":
        body += b" "
    else:
        headers[changed] = {"webhook-timestamp": "1001"}.get(changed, headers[changed][:-1])
    with pytest.raises(BadSignature):
        verify(secret, headers, body, now=1000)


@given(st.text(), st.text(), st.text())
def test_headers_that_make_no_sense_are_refused(message_id: str, stamp: str, signature: str) -> None:
    headers = {"webhook-id": message_id, "webhook-timestamp": stamp, "webhook-signature": signature}
    with pytest.raises(BadSignature):
        verify(new_secret(), headers, b"{}", now=0)


@pytest.mark.parametrize("length", [24, 64])
def test_secrets_of_24_to_64_bytes(length: int) -> None:
    assert secret_bytes("whsec_" + base64.b64encode(b"x" * length).decode()) == b"x" * length


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        (base64.b64encode(b"x" * 32).decode(), "starts with 'whsec_'"),
        ("whsec_" + base64.b64encode(b"x" * 23).decode(), "23 bytes; give one of 24 to 64"),
        ("whsec_" + base64.b64encode(b"x" * 65).decode(), "65 bytes; give one of 24 to 64"),
        ("whsec_ä", "stands base64; this is not"),
        ("whsec_abc", "stands base64; this is not"),
    ],
)
def test_other_secrets_are_refused_and_not_repeated(secret: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as error:
        secret_bytes(secret)
    assert secret not in str(error.value)


def test_new_secrets_differ_and_fit() -> None:
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(secret_bytes(new_secret())) == 32
