"""Signatures, checked by the packages that receivers use."""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from openai.types.webhooks import BatchCompletedWebhookEvent
from standardwebhooks import Webhook as StandardWebhook
from standardwebhooks.webhooks import WebhookVerificationError

from batchwright.service.webhooks.courier import event_body
from batchwright.service.webhooks.signing import new_secret, signed_headers
from batchwright.store.records import Delivery

DELIVERY = Delivery("del_1", "evt_1", "default", "batch.completed", "batch_1", 1_700_000_000.9, "https://x", None, 0)


def test_the_signature_of_the_specification() -> None:
    """HMAC-SHA256 of id.timestamp.body, with the bytes that the secret encodes."""
    secret = "whsec_" + base64.b64encode(b"k" * 24).decode()
    right = base64.b64encode(hmac.new(b"k" * 24, b'msg_1.1614265330.{"test": 1}', hashlib.sha256).digest()).decode()
    headers = signed_headers([secret], message_id="msg_1", timestamp=1614265330, body=b'{"test": 1}')
    assert headers["webhook-signature"] == f"v1,{right}"


def test_both_packages_accept_each_secret_while_one_rotates() -> None:
    body = event_body(DELIVERY)
    old, new = new_secret(), new_secret()
    headers = signed_headers([new, old], message_id=DELIVERY.event_id, timestamp=int(time.time()), body=body)
    assert headers["webhook-signature"].count("v1,") == 2
    for secret in (old, new):
        assert StandardWebhook(secret).verify(body, headers)["id"] == "evt_1"
        event = OpenAI(api_key="none", webhook_secret=secret).webhooks.unwrap(body, headers)
        assert isinstance(event, BatchCompletedWebhookEvent)
        assert (event.data.id, event.created_at, event.object) == ("batch_1", 1_700_000_000, "event")


def test_both_refuse_another_secret_and_an_old_timestamp() -> None:
    body = event_body(DELIVERY)
    secret = new_secret()
    for wrong, age in ((new_secret(), 0), (secret, 301)):
        headers = signed_headers([secret], message_id="evt_1", timestamp=int(time.time()) - age, body=body)
        with pytest.raises(WebhookVerificationError):
            StandardWebhook(wrong).verify(body, headers)
        with pytest.raises(InvalidWebhookSignatureError):
            OpenAI(api_key="none").webhooks.unwrap(body, headers, secret=wrong)


def test_new_secrets_differ_and_have_32_bytes() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert {len(base64.b64decode(secret.removeprefix("whsec_"))) for secret in secrets} == {32}
