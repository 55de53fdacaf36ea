"""Lines of a batch's input file: what is checked of each before the batch begins.

Only the frame of a line is judged here. Its sampling parameters, its messages and so on are judged when it is computed,
and then that line fails alone; a line whose frame is wrong fails the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from batchwright.errors import shown
from batchwright.wire.bounds import MAX_MODEL

MAX_CUSTOM_ID = 512
"""Characters."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line whose frame is right."""

    custom_id: str
    model: str | None
    """None: the body names none, and gets the default one."""
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a line cannot be taken, in OpenAI's terms: what stands in the `errors` of a batch, beside its number."""

    code: str
    message: str
    param: str | None = None


def parse_batch_line(content: bytes, endpoint: str, *, model: str | None = None) -> BatchLine | LineProblem:
    """Read one line (without its newline) of an input for `endpoint`. Raises nothing, whatever the bytes.

    `model` is the one that the lines before name; None: they name none. Whether a custom_id was used before is not seen
    here.
    """
    try:
        line = msgspec.json.decode(content.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        return LineProblem("invalid_json_line", f"This line is not parseable as valid JSON: {error}.")
    if not isinstance(line, dict):
        return LineProblem("invalid_json_line", f"This line is a JSON {_json_type(line)}: it must be an object.")
    for name in ("custom_id", "method", "url", "body"):
        if line.get(name) is None:
            return LineProblem("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    body = line["body"]
    problem = _custom_id_problem(line["custom_id"]) or _target_problem(line["method"], line["url"], endpoint)
    if problem is None and not isinstance(body, dict):
        problem = LineProblem("invalid_type", f"body is a JSON {_json_type(body)}: it must be an object.", "body")
    problem = problem or _body_problem(body, model)
    return problem or BatchLine(line["custom_id"], body.get("model"), body)


def _custom_id_problem(custom_id: object) -> LineProblem | None:
    if not isinstance(custom_id, str):
        return LineProblem(
            "invalid_type", f"custom_id is a JSON {_json_type(custom_id)}: it must be text.", "custom_id"
        )
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID or "\0" in custom_id:
        return LineProblem(
            "invalid_custom_id",
            f"custom_id has {len(custom_id)} characters: it must have 1 to {MAX_CUSTOM_ID}, and none of them NUL.",
            "custom_id",
        )
    return None


def _target_problem(method: object, url: object, endpoint: str) -> LineProblem | None:
    if method != "POST":
        return LineProblem("invalid_method", f"method is {shown(method)}: it must be 'POST'.", "method")
    if url != endpoint:
        return LineProblem(
            "invalid_url", f"url is {shown(url)}: it must be the endpoint of the batch, {endpoint!r}.", "url"
        )
    return None


def _body_problem(body: dict[str, Any], model: str | None) -> LineProblem | None:
    if body.get("stream") not in (None, False):
        return LineProblem("invalid_request", "stream is not possible in a batch: leave it out.", "body.stream")
    own = body.get("model")
    if own is None:
        return None
    if isinstance(own, str) and len(own) > MAX_MODEL:
        return LineProblem(
            "string_above_max_length",
            f"model has {len(own):,} characters, the most is {MAX_MODEL}.",
            "body.model",
        )
    if not isinstance(own, str) or not own or "\0" in own:
        return LineProblem("invalid_type", f"model is {shown(own)}: it must be the name of a model.", "body.model")
    if model is not None and own != model:
        return LineProblem(
            "mismatched_model",
            f"model is {shown(own)}, before it was {shown(model)}: all lines of a batch must have the same.",
            "body.model",
        )
    return None


def _json_type(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
