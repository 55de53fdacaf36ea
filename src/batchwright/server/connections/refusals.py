"""Answers to what never becomes a request: the bytes of an error in the form of the service."""

from __future__ import annotations

from http import HTTPStatus

from batchwright.server.http.error_answers import HttpError, error_response
from batchwright.server.http.middleware import new_request_id


def closing_answer(error: HttpError) -> bytes:
    """An answer after which the connection is closed."""
    response = error_response(error)
    response.headers["connection"] = "close"
    response.headers["x-request-id"] = new_request_id()
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)
