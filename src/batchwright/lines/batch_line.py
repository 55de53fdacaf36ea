"""Lines of OpenAI's batch files, and the checks of each before anything is computed.

Only the frame of a line is checked here. Its sampling parameters, its messages and so on are checked where it is
computed. The codes and messages are OpenAI's, and the same wherever a line comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from batchwright.errors import InvalidRequest, shown
from batchwright.wire.bounds import MAX_MODEL
from batchwright.wire.requests import CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL

MAX_CUSTOM_ID = 512
"""Most characters of a custom_id."""

ENDPOINTS = (CHAT_URL, COMPLETION_URL, EMBEDDINGS_URL)
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line whose frame is valid."""

    custom_id: str
    endpoint: str
    """Endpoint, one of `ENDPOINTS`."""
    body: Mapping[str, Any]

    @property
    def model(self) -> str | None:
        """Model that the body names; None: it names none, and gets the default one."""
        return self.body.get("model")


def decode_line(content: bytes) -> dict[str, Any]:
    """Return the JSON object in one line (without its newline). Raises `InvalidRequest`, whatever the bytes."""
    try:
        line = msgspec.json.decode(content.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"This line is not parseable as valid JSON: {error}.", code="invalid_json_line") from error
    if not isinstance(line, dict):
        raise InvalidRequest(f"This line is a JSON {_json_type(line)}: it must be an object.", code="invalid_json_line")
    return line


def check_batch_line(line: Mapping[str, Any]) -> BatchLine:
    """Check the frame of a decoded line. Raises `InvalidRequest`; uniqueness of its custom_id is not checked here."""
    for name in ("custom_id", "method", "url", "body"):
        if line.get(name) is None:
            raise InvalidRequest(
                f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
            )
    custom_id, method, url, body = line["custom_id"], line["method"], line["url"], line["body"]
    if not isinstance(custom_id, str):
        raise _wrong_type("custom_id", custom_id, "text")
    check_custom_id("custom_id", custom_id)
    if method != "POST":
        raise InvalidRequest(f"method is {shown(method)}: it must be 'POST'.", param="method", code="invalid_method")
    if url not in ENDPOINTS:
        raise InvalidRequest(
            f"url is {shown(url)}: it must be one of {', '.join(ENDPOINTS)}.", param="url", code="invalid_url"
        )
    if not isinstance(body, dict):
        raise _wrong_type("body", body, "an object")
    _check_body(body)
    return BatchLine(custom_id, url, body)


def check_custom_id(name: str, custom_id: str) -> None:
    """Raise `InvalidRequest` for an id, given as the field `name`, that is too long, empty, or has a NUL in it."""
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID or "\0" in custom_id:
        raise InvalidRequest(
            f"{name} has {len(custom_id)} characters: it must have 1 to {MAX_CUSTOM_ID}, and none of them NUL.",
            param=name,
            code="invalid_custom_id",
        )


def line_too_long(limit: int) -> InvalidRequest:
    """Return the error of a line of more than `limit` bytes."""
    return InvalidRequest(
        f"This line has more than {limit:,} bytes, the limit (max_line_bytes): shorten it, or raise the limit.",
        code="line_too_long",
    )


def _check_body(body: dict[str, Any]) -> None:
    if body.get("stream") not in (None, False):
        raise InvalidRequest(
            "stream is not possible in a batch: leave it out.", param="body.stream", code="invalid_request"
        )
    model = body.get("model")
    if model is None:
        return
    if isinstance(model, str) and len(model) > MAX_MODEL:
        raise InvalidRequest(
            f"model has {len(model):,} characters, the most is {MAX_MODEL}.",
            param="body.model",
            code="string_above_max_length",
        )
    if not isinstance(model, str) or not model or "\0" in model:
        raise InvalidRequest(
            f"model is {shown(model)}: it must be the name of a model.", param="body.model", code="invalid_type"
        )


def _wrong_type(name: str, value: object, needed: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is a JSON {_json_type(value)}: it must be {needed}.", param=name, code="invalid_type"
    )


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
