"""Lines of batches as text, errors by code, and inputs made of tables, over HTTP."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.server.batch_files import begin, line
from tests.server.conftest import Service, with_service

from batchwright.service.batches import line_reader, table_conversion

QUESTIONS = ["name a river", "name a lake", "fail please", "name a River too"]


async def lines(service: Service, batch_id: str, **asked: Any) -> dict[str, Any]:
    answer = await service.http.get(f"/v1/batches/{batch_id}/lines", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def asked(service: Service) -> str:
    """The id of a batch of `QUESTIONS` that has ended."""
    made = await begin(service, *(line(f"q{number}", text) for number, text in enumerate(QUESTIONS)))
    return (await service.ended(made.id)).id


@with_service()
async def test_prompts_are_shown_beside_answers(service: Service) -> None:
    page = await lines(service, await asked(service))
    assert [each["prompt"] for each in page["data"]] == QUESTIONS
    first, failed = page["data"][0], page["data"][2]
    assert (first["line"], first["custom_id"], first["answer"]) == (1, "q0", "NAME A RIVER")
    assert (first["state"], first["finish_reason"], first["completion_tokens"]) == ("succeeded", "stop", 3)
    assert (failed["state"], failed["answer"]) == ("failed", None)
    assert "asked to fail" in failed["error"]["message"]
    assert page["next_after"] is None


@with_service()
async def test_pages_follow_each_other(service: Service) -> None:
    batch = await asked(service)
    seen: list[int] = []
    after: int | None = 0
    while after is not None:
        page = await lines(service, batch, after=after, limit=3)
        seen += [each["line"] for each in page["data"]]
        after = page["next_after"]
    assert seen == [1, 2, 3, 4]


@with_service()
async def test_lines_are_searched_and_chosen_by_state(service: Service) -> None:
    batch = await asked(service)
    for search, found in (("RIVER", [1, 4]), ("asked to fail", [3]), ("q1", [2]), ("nowhere", [])):
        page = await lines(service, batch, search=search)
        assert ([each["line"] for each in page["data"]], page["next_after"]) == (found, None), search
    assert [each["line"] for each in (await lines(service, batch, state="failed"))["data"]] == [3]
    assert [each["line"] for each in (await lines(service, batch, state="succeeded", search="too"))["data"]] == [4]
    first = await lines(service, batch, search="river", limit=1)
    assert (first["data"][0]["line"], first["next_after"]) == (1, 1)


@with_service()
async def test_a_search_looks_at_a_bounded_number_of_lines(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await asked(service)
    monkeypatch.setattr(line_reader, "_PAGE_LINES", 1)
    monkeypatch.setattr(line_reader, "_SEARCHED_LINES", 2)
    monkeypatch.setattr(line_reader, "_PIECE_BYTES", 1)
    first = await lines(service, batch, search="too")
    assert (first["data"], first["next_after"]) == ([], 2)
    then = await lines(service, batch, search="too", after=first["next_after"])
    assert ([each["line"] for each in then["data"]], then["next_after"]) == ([4], None)


@with_service()
async def test_chats_are_shown_with_their_roles(service: Service) -> None:
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    one = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": said}}
    made = await begin(service, one, endpoint="/v1/chat/completions")
    await service.ended(made.id)
    [shown] = (await lines(service, made.id))["data"]
    assert shown["prompt"] == 'system: be brief\n\nuser: [{"type":"text","text":"hi"}]'


@with_service()
async def test_lines_of_a_running_batch_wait(service: Service) -> None:
    service.stub.gate.clear()
    made = await begin(service, line("a", "one"), line("b", "two"))

    async def shown() -> bool:
        return len((await lines(service, made.id))["data"]) == 2

    await service.until(shown)
    assert {each["answer"] for each in (await lines(service, made.id))["data"]} == {None}
    service.stub.gate.set()
    await service.ended(made.id)
    assert [each["answer"] for each in (await lines(service, made.id))["data"]] == ["ONE", "TWO"]


@with_service()
async def test_errors_are_counted_by_code(service: Service) -> None:
    wrong = [line(f"t{number}", "x", temperature=77) for number in range(3)]
    made = await begin(service, *wrong, line("a", "fine"), line("b", "fail"))
    await service.ended(made.id)
    answer = (await service.http.get(f"/v1/batches/{made.id}/errors")).json()
    first, second = answer["data"]
    assert (first["code"], first["count"], first["example"]["line"]) == ("invalid_request", 3, 1)
    assert "temperature=77" in first["example"]["error"]["message"]
    assert first["example"]["prompt"] == "x"
    assert second["count"] == 1
    assert (answer["counted"], answer["has_more"]) == (4, False)


def parquet(columns: dict[str, list[Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


TABLES = {
    "a.csv": b'id,text\n1,one\n2,"two, too"\n',
    "a.tsv": b"id\ttext\n1\tone\n2\ttwo, too\n",
    "a.json": b'[{"text": "one"}, {"text": "two, too"}]',
    "a.jsonl": b'{"text": "one"}\n{"text": "two, too"}\n',
    "a.parquet": parquet({"text": ["one", "two, too"]}),
}


async def uploaded(service: Service, name: str, content: bytes) -> str:
    return (await service.client.files.create(file=(name, content), purpose="batch")).id


async def converted(service: Service, file_id: str, **options: Any) -> Any:
    return await service.http.post(f"/v1/files/{file_id}/requests", json=options)


async def requests_in(service: Service, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in (await service.client.files.content(file_id)).text.splitlines()]


@pytest.mark.parametrize("name", TABLES)
@with_service()
async def test_a_table_becomes_the_input_of_a_batch(service: Service, name: str) -> None:
    table = await uploaded(service, name, TABLES[name])
    answer = await converted(service, table, prompt_template="say {text}", system_template="of {text}", max_tokens=3)
    told = answer.json()
    assert (told["rows"], told["skipped"], told["file"]["filename"]) == (2, 0, "a.requests.jsonl"), told
    first, second = await requests_in(service, told["file"]["id"])
    assert first["custom_id"] != second["custom_id"]
    assert (first["url"], second["body"]["max_tokens"]) == ("/v1/chat/completions", 3)
    assert [each["content"] for each in second["body"]["messages"]] == ["of two, too", "say two, too"]
    made = await service.client.batches.create(
        input_file_id=told["file"]["id"], endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert (await service.ended(made.id)).request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", b"one\ntwo\n"), ("a.jsonl", b'{"prompt": "one"}\n{"prompt": "two", "id": "x"}\n')]
)
@with_service()
async def test_prompts_need_no_template(service: Service, name: str, content: bytes) -> None:
    told = (await converted(service, await uploaded(service, name, content), endpoint="/v1/completions")).json()
    found = await requests_in(service, told["file"]["id"])
    assert [each["body"] for each in found] == [{"prompt": "one"}, {"prompt": "two"}]
    assert found[1]["custom_id"] == ("x" if name == "a.jsonl" else "row-2")


@pytest.mark.parametrize(
    ("name", "content", "options", "told"),
    [
        ("a.csv", TABLES["a.csv"], {"prompt_template": "{txt}"}, "no column 'txt' in the input; it has 'id', 'text'"),
        ("a.csv", TABLES["a.csv"], {}, "a.csv is a table: give a prompt_template"),
        ("a.csv", TABLES["a.csv"], {"prompt_template": "always"}, "names no column"),
        (
            "a.csv",
            ",".join(f"a long name of column {number}" for number in range(6000)).encode() + b"\nx\n",
            {"prompt_template": "{text}"},
            "no column 'text' in the input",
        ),
        ("a.csv", TABLES["a.csv"], {"prompt_template": "{" * 65_001}, "prompt template"),
        ("a.csv", TABLES["a.csv"], {"prompt_template": "{text"}, "prompt template"),
        ("a.parquet", b"PAR1 no more", {"prompt_template": "{text}"}, "a.parquet"),
        ("a.csv.gz", b"packed", {"prompt_template": "{text}"}, "is compressed: upload it as a.csv"),
        ("a.jsonl", b'{"prompt": "x", "id": "row-2"}\n', {}, "ids like 'row-2' are for rows without one"),
        ("a.xlsx", b"PK", {"prompt_template": "{text}"}, "its extension does not give its format"),
        ("a.csv", b"id,text\n1,\n", {"prompt_template": "{text}"}, "no row from which a request could be made"),
        ("a.jsonl", b'{"text": 1}\nnot json\n', {"prompt_template": "{text}"}, "row 2"),
        (
            "a.csv",
            TABLES["a.csv"],
            {"prompt_template": "{text}", "system_template": "{id}", "endpoint": "/v1/completions"},
            "has no system messages",
        ),
    ],
)
@with_service()
async def test_what_cannot_be_converted_is_said_and_leaves_nothing(
    service: Service, name: str, content: bytes, options: dict[str, Any], told: str
) -> None:
    answer = await converted(service, await uploaded(service, name, content), **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert told in error["message"]
    assert "/dev/fd" not in error["message"]
    assert [file.filename for file in (await service.client.files.list()).data] == [name]


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("a.txt", b"one\n", {"prompt_template": "say {prompt}"}, ["say one"]),
        ("a.txt", b"one\n", {"system_template": "be brief"}, ["be brief", "one"]),
        ("a.jsonl", b'{"prompt": "one"}\n', {"system_template": "be brief"}, ["be brief", "one"]),
        ("a.jsonl", b'{"prompt": "one"}\n', {"system_template": "be {{brief}}"}, ["be {brief}", "one"]),
        ("a.jsonl", b'{"prompt": "one", "as": "x"}\n', {"system_template": "be {as}"}, ["be x", "one"]),
        ("a.csv", "text\n水\n".encode(), {"prompt_template": "水" * 40_000 + "{text}"}, ["水" * 40_001]),
    ],
)
@with_service()
async def test_prompts_and_templates_go_together(
    service: Service, name: str, content: bytes, options: dict[str, Any], said: list[str]
) -> None:
    told = (await converted(service, await uploaded(service, name, content), **options)).json()
    [found] = await requests_in(service, told["file"]["id"])
    assert [each["content"] for each in found["body"]["messages"]] == said


@with_service()
async def test_an_array_of_requests_becomes_lines(service: Service) -> None:
    array = json.dumps([line("a", "one"), line("b", "two")]).encode()
    told = (await converted(service, await uploaded(service, "a.json", array), endpoint="/v1/completions")).json()
    assert [each["custom_id"] for each in await requests_in(service, told["file"]["id"])] == ["a", "b"]


@with_service()
async def test_lines_that_were_removed_are_not_found(service: Service) -> None:
    batch = await service.client.batches.retrieve(await asked(service))
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        await service.client.files.delete(file_id)
    for what in ("lines", "errors"):

        async def gone(what: str = what) -> bool:
            answer = await service.http.get(f"/v1/batches/{batch.id}/{what}")
            return answer.status_code == 404 and "removed" in answer.text

        await service.until(gone)


@with_service()
async def test_empty_cells_are_left_out_and_counted(service: Service) -> None:
    table = await uploaded(service, "a.csv", b"id,text\n1,one\n2,\n3,three\n")
    told = (await converted(service, table, prompt_template="{text}")).json()
    assert (told["rows"], told["skipped"], told["first_skipped"]) == (2, 1, 3)


@with_service()
async def test_few_tables_are_converted_at_a_time(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_conversion, "_AT_ONCE", 0)
    answer = await converted(service, await uploaded(service, "a.csv", TABLES["a.csv"]), prompt_template="{text}")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    monkeypatch.undo()
    service.services.jobs._tables.running.add("default")
    answer = await converted(service, await uploaded(service, "b.csv", TABLES["a.csv"]), prompt_template="{text}")
    assert (answer.status_code, "a table of yours" in answer.text) == (429, True)


@with_service(max_file_size=2000)
async def test_requests_that_are_larger_than_a_file_may_be_are_given_up(service: Service) -> None:
    # So much that the process has to wait for its reader.
    table = await uploaded(service, "a.csv", b"text\n" + b"one\n" * 300)
    answer = await converted(service, table, prompt_template="{text} " + "x" * 50_000)
    assert answer.json()["error"]["code"] == "file_too_large"
    assert len((await service.client.files.list()).data) == 1
    assert service.services.jobs._tables.running == set()
