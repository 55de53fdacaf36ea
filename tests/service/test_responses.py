"""Batches of `/v1/responses`: refused where an endpoint elsewhere computes that has none, and what their lines used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.service.support import TENANT, House, line, run

from batchwright.errors import InvalidRequest
from batchwright.service.limits import ServiceLimits
from batchwright.service.settings import Settings, limits_of
from batchwright.service.worker.output_lines import usage_of
from batchwright.store.records import TokenUsage


@pytest.mark.parametrize(
    ("settings", "taken"),
    [
        ({}, True),
        ({"backend": "http://127.0.0.1:1/v1"}, True),
        ({"backend": "http://127.0.0.1:1/v1", "backend_dialect": "anthropic"}, False),
        ({"backend": "https://api.anthropic.com/v1"}, False),
    ],
)
def test_who_takes_them(settings: dict[str, Any], taken: bool) -> None:
    assert limits_of(Settings(**settings)).responses is taken


def test_a_batch_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    async def submit(house: House) -> str:
        file_id = await house.upload(line("a", url="/v1/responses", body={"input": "a"}))
        return (await house.jobs.create_batch(TENANT, input_file_id=file_id, endpoint="/v1/responses")).endpoint

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    assert run(tmp_path / "here", submit) == "/v1/responses"
    with pytest.raises(InvalidRequest, match="no counterpart in the dialect") as caught:
        run(tmp_path / "elsewhere", submit, ServiceLimits(responses=False))
    assert caught.value.param == "endpoint"


def test_what_a_line_used() -> None:
    usage = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 2},
    }
    expected = TokenUsage(input_tokens=5, cached_tokens=3, output_tokens=6, reasoning_tokens=2)
    assert usage_of({"usage": usage}) == expected
