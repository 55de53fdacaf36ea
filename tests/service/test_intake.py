"""Validation of input files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.service.support import ENDPOINT, TENANT, House, Model, in_house, line, run, texts

from batchwright.service.limits import ServiceLimits
from batchwright.store.records import BatchProblem, LineCounts

BOM = b"\xef\xbb\xbf"


async def _problems(house: House, *contents: bytes) -> list[tuple[str, int | None, str | None]]:
    """Code, line and param of what is wrong."""
    file_id = await house.upload(*contents)
    async with house.worker(Model()):
        batch = await house.ended(await house.jobs.create_batch(TENANT, input_file_id=file_id, endpoint=ENDPOINT))
    assert batch.status == "failed"
    assert (batch.counts, batch.failed_at is not None) == (LineCounts(), True)
    assert await house.jobs.results(TENANT, batch.id) == []
    return [(each.code, each.line, each.param) for each in batch.errors]


def test_what_is_wrong_is_told_with_its_line(tmp_path: Path) -> None:
    bad = [
        line("a"),
        b"\n",
        b"{not json\n",
        line("b", "id-a"),
        line("c", method="GET"),
        line("d", body={"model": "other", "prompt": "d"}),
        line("e"),
        line("f", url="/v1/embeddings"),
        line("g", body={"prompt": "g", "stream": True}),
    ]
    expected = [
        ("invalid_json_line", 3, None),
        ("duplicate_custom_id", 4, "custom_id"),
        ("invalid_method", 5, "method"),
        ("mismatched_model", 6, "body.model"),
        ("invalid_url", 8, "url"),
        ("invalid_request", 9, "body.stream"),
    ]
    assert run(tmp_path, lambda house: _problems(house, *bad)) == expected


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n"])
def test_a_file_without_lines_is_refused(tmp_path: Path, content: bytes) -> None:
    assert run(tmp_path, lambda house: _problems(house, content)) == [("empty_file", None, "input_file_id")]


def test_a_hundred_problems_are_enough(tmp_path: Path) -> None:
    found = run(tmp_path, lambda house: _problems(house, *[b"x\n"] * 1000))
    assert [number for _, number, _ in found] == [*range(1, 101)]


def test_a_file_uploaded_under_larger_limits_is_measured_again(tmp_path: Path) -> None:
    async def main(house: House) -> list[tuple[str, int | None, str | None]]:
        file_id = await house.upload(*map(line, "abcdef"), line("x" * 100), line("y" * 2000), line("z"))
        house.limits = ServiceLimits(max_lines=7, max_line_bytes=600)
        async with house.worker(Model()):
            batch = await house.ended(await house.jobs.create_batch(TENANT, input_file_id=file_id, endpoint=ENDPOINT))
        return [(each.code, each.line, each.param) for each in batch.errors]

    assert run(tmp_path, main) == [("line_too_long", 8, None), ("too_many_lines", None, None)]


def test_a_file_that_was_lost_is_told(tmp_path: Path) -> None:
    async def main(house: House) -> tuple[BatchProblem, ...]:
        batch = await house.submit("abc")
        await house.blobs.remove([batch.input_file_id])
        async with house.worker(Model()):
            return (await house.ended(batch)).errors

    [problem] = run(tmp_path, main)
    assert (problem.code, problem.param) == ("file_not_found", "input_file_id")


@in_house
async def test_ends_of_lines_blank_ones_and_a_mark_at_the_beginning_do_no_harm(house: House) -> None:
    crlf = line("b").replace(b"\n", b"\r\n")
    content = BOM + line("a") + b"\n" + crlf + b"  \n" + line("ü😀").rstrip()
    file_id = await house.upload(content)
    async with house.worker(Model()):
        batch = await house.ended(await house.jobs.create_batch(TENANT, input_file_id=file_id, endpoint=ENDPOINT))
    assert batch.counts == LineCounts(3, 3, 0)
    output = await house.content(batch.output_file_id)
    assert texts(output) == {"id-a": "A", "id-b": "B", "id-ü😀": "Ü😀"}
    assert [each["id"].rpartition("_")[2] for each in output] == ["1", "3", "5"]


@in_house
async def test_many_lines_are_taken_in_pieces(house: House) -> None:
    batch = await house.submit(map(str, range(3000)))
    async with house.worker(Model(slots=500)):
        batch = await house.ended(batch)
    assert batch.counts == LineCounts(3000, 3000, 0)
