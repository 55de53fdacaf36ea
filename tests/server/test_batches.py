"""Files and batches through all their states, with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from tests.server.batch_files import begin, content, line, output, upload
from tests.server.conftest import Service, with_service


async def _true(value: bool) -> bool:
    return value


@with_service()
async def test_a_batch_is_completed_with_its_output(service: Service) -> None:
    made = await begin(service, line("a", "one two"), line("b", "three"), metadata={"who": "me"})
    assert (made.status, made.object, made.metadata) == ("validating", "batch", {"who": "me"})
    batch = await service.ended(made.id)
    assert (batch.status, batch.error_file_id, batch.model) == ("completed", None, "stub")
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (3, 3, 6)
    results = await output(service, batch.output_file_id)
    assert results["a"]["response"]["body"]["choices"][0]["text"] == "ONE TWO"
    assert results["b"]["response"]["status_code"] == 200
    assert batch.completed_at is not None
    assert batch.model_extra is not None
    assert batch.model_extra["progress"]["fraction"] == 1.0


@with_service()
async def test_a_batch_whose_input_is_wrong_fails_with_the_numbers_of_its_lines(service: Service) -> None:
    wrong = {"custom_id": "b", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}}
    made = await begin(service, line("a", "x"), wrong, line("a", "y"))
    batch = await service.ended(made.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.line, each.param) for each in batch.errors.data] == [(2, "method"), (3, "custom_id")]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


@with_service()
async def test_lines_that_fail_are_in_the_error_file_and_can_be_retried(service: Service) -> None:
    made = await begin(service, line("a", "x"), line("b", "fail"), line("c", "y", temperature=99))
    batch = await service.ended(made.id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    errors = await output(service, batch.error_file_id)
    assert {name: each["response"]["status_code"] for name, each in errors.items()} == {"b": 500, "c": 400}
    assert errors["c"]["response"]["body"]["error"]["param"] == "temperature"
    retried = await service.client.post(f"/batches/{batch.id}/retry", cast_to=openai.types.Batch)
    again = await service.ended(retried.id)
    assert again.request_counts is not None
    assert again.request_counts.to_dict() == {"total": 2, "completed": 0, "failed": 2}
    assert again.model_extra is not None
    assert again.model_extra["parent_id"] == batch.id


@with_service()
async def test_a_batch_all_of_whose_lines_fail_is_completed_with_an_error_file_only(service: Service) -> None:
    made = await begin(service, line("a", "fail"), line("b", "fail"))
    batch = await service.ended(made.id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert set(await output(service, batch.error_file_id)) == {"a", "b"}


@with_service()
async def test_a_batch_cancelled_while_it_runs_keeps_what_was_done(service: Service) -> None:
    made = await begin(service, line("a", "x"), line("b", "wait"), line("c", "wait"))

    async def one_is_done() -> bool:
        counts = (await service.client.batches.retrieve(made.id)).request_counts
        return counts is not None and counts.completed == 1

    await service.until(one_is_done)
    cancelling = await service.client.batches.cancel(made.id)
    assert cancelling.status in ("cancelling", "cancelled")
    batch = await service.ended(made.id)
    assert batch.status == "cancelled"
    assert set(await output(service, batch.output_file_id)) == {"a"}
    errors = await output(service, batch.error_file_id)
    assert {name: each["error"]["code"] for name, each in errors.items()} == {
        "b": "batch_cancelled",
        "c": "batch_cancelled",
    }

    async def dropped() -> bool:
        return service.stub.cancelled == 2

    await service.until(dropped)


@with_service()
async def test_a_batch_whose_time_is_over_expires(service: Service) -> None:
    made = await begin(service, line("a", "x"), line("b", "wait"), completion_window="2h")
    await service.until(lambda: _true(service.stub.waiting == 1))
    service.wall.forward(7201)
    service.services.worker.wake()
    batch = await service.ended(made.id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    errors = await output(service, batch.error_file_id)
    assert errors["b"]["error"]["code"] == "batch_expired"


@with_service()
async def test_a_paused_batch_waits_until_it_is_resumed(service: Service) -> None:
    service.stub.gate.clear()
    made = await begin(service, line("a", "x"), line("b", "y"))
    paused = await service.http.post(f"/v1/batches/{made.id}/pause")
    assert paused.json()["paused"] is True
    service.stub.gate.set()
    resumed = await service.http.post(f"/v1/batches/{made.id}/resume")
    assert resumed.json()["paused"] is False
    assert (await service.ended(made.id)).status == "completed"


@with_service()
async def test_results_can_be_read_while_the_batch_runs(service: Service) -> None:
    made = await begin(service, line("a", "x"), line("b", "y"), line("c", "wait"))
    path = f"/v1/batches/{made.id}/results"

    async def two_are_done() -> bool:
        return len((await service.http.get(path)).json()["data"]) == 2

    await service.until(two_are_done)
    first = (await service.http.get(path, params={"limit": 1})).json()
    assert (len(first["data"]), first["has_more"]) == (1, True)
    second = (await service.http.get(path, params={"after": first["next_after"]})).json()
    assert (len(second["data"]), second["has_more"]) == (1, False)
    assert {first["data"][0]["custom_id"], second["data"][0]["custom_id"]} == {"a", "b"}
    service.stub.go.set()
    await service.ended(made.id)
    last = (await service.http.get(path, params={"after": second["next_after"]})).json()
    assert [each["custom_id"] for each in last["data"]] == ["c"]
    nothing = (await service.http.get(path, params={"after": last["next_after"]})).json()
    assert (nothing["data"], nothing["next_after"]) == ([], last["next_after"])


@with_service()
async def test_lines_and_results_go_with_the_output_files(service: Service) -> None:
    made = await begin(service, line("a", "x"), line("b", "fail"))
    batch = await service.ended(made.id)
    for file_id in (batch.output_file_id, batch.error_file_id):
        await service.client.files.delete(file_id or "")

    async def they_are_gone() -> bool:
        return (await service.http.get(f"/v1/batches/{made.id}/results")).status_code == 404

    await service.until(they_are_gone)
    answer = await service.http.get(f"/v1/batches/{made.id}/results")
    assert "were removed with its output files on" in answer.json()["error"]["message"]
    retried = await service.http.post(f"/v1/batches/{made.id}/retry")
    assert (retried.status_code, retried.json()["error"]["message"].count("removed")) == (409, 1)
    assert (await service.client.batches.retrieve(made.id)).request_counts == batch.request_counts
    simple = (await service.http.post("/v1/batch/async", json={"prompts": ["a"]})).json()
    path = f"/v1/batch/{simple['batch_id']}"
    output = (await service.ended(simple["batch_id"])).output_file_id
    assert (await service.http.get(path)).json()["outputs"] == ["A"]
    await service.client.files.delete(output or "")

    async def it_is_gone() -> bool:
        return (await service.http.get(path)).json()["outputs"] is None

    await service.until(it_is_gone)
    assert (await service.http.get(path)).json()["status"] == "completed"


@with_service()
async def test_the_same_idempotency_key_gives_the_same_batch(service: Service) -> None:
    file_id = await upload(service, line("a", "x"))
    made = [
        await service.client.batches.create(
            input_file_id=file_id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers={"Idempotency-Key": key},
        )
        for key in ("one", "one", "two")
    ]
    assert made[0].id == made[1].id != made[2].id


@pytest.mark.parametrize("changed", [{"completion_window": "1h"}, {"metadata": {"a": "b"}}, {"input_file_id": None}])
@with_service()
async def test_an_idempotency_key_is_of_one_request(service: Service, changed: dict[str, Any]) -> None:
    body = {"input_file_id": await upload(service, line("a", "x")), "endpoint": "/v1/completions"}
    body["completion_window"] = "24h"
    key = {"Idempotency-Key": "one"}
    made = (await service.http.post("/v1/batches", json=body, headers=key)).json()
    other = {name: value or await upload(service, line("b", "y")) for name, value in changed.items()}
    for path, asked in (("/v1/batches", body | other), ("/v1/batch/async", {"prompts": ["x"]})):
        answer = await service.http.post(path, json=asked, headers=key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_key_reused")
    await service.ended(made["id"])
    assert len((await service.http.get("/v1/batches")).json()["data"]) == 1


@with_service()
async def test_batches_and_files_are_listed_in_pages(service: Service) -> None:
    made = [(await begin(service, line("a", "x"))).id for _ in range(5)]
    listed = [batch.id async for batch in service.client.batches.list(limit=2)]
    assert listed == made[::-1]
    page = (await service.http.get("/v1/batches", params={"limit": 2})).json()
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[4], made[3], True)
    for batch_id in made:
        await service.ended(batch_id)
    inputs = [file.id async for file in service.client.files.list(purpose="batch", order="asc", limit=2)]
    assert len(inputs) == 5
    assert len([file async for file in service.client.files.list()]) == 10
    for path in ("/v1/files", "/v1/batches"):
        answer = await service.http.get(path, params={"after": "file-none"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "after")


@with_service()
async def test_a_file_is_described_read_and_deleted(service: Service) -> None:
    sent = content(line("ä", "ü"))
    file = await service.client.files.create(
        file=("ein näme.jsonl", sent), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.status) == (len(sent), "ein näme.jsonl", "processed")
    assert file.expires_at == file.created_at + 3600
    assert (await service.client.files.retrieve(file.id)).id == file.id
    read = await service.http.get(f"/v1/files/{file.id}/content", headers={"accept": "application/binary"})
    assert (read.content, read.headers["content-length"]) == (sent, str(len(sent)))
    deleted = await service.client.files.delete(file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    with pytest.raises(openai.NotFoundError):
        await service.client.files.retrieve(file.id)


@with_service()
async def test_the_input_of_a_batch_that_runs_cannot_be_deleted(service: Service) -> None:
    made = await begin(service, line("a", "wait"))
    with pytest.raises(openai.ConflictError):
        await service.client.files.delete(made.input_file_id)
    with pytest.raises(openai.ConflictError):
        await service.client.post(f"/batches/{made.id}/retry", cast_to=openai.types.Batch)
    await service.client.batches.cancel(made.id)
    await service.ended(made.id)
    await service.client.files.delete(made.input_file_id)


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, None),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"input_file_id": "nul\0"}, "input_file_id"),
        ({"unknown": 1}, "unknown"),
    ],
)
@with_service()
async def test_what_is_wrong_with_a_batch_is_told_by_name(
    service: Service, changed: dict[str, Any], param: str | None
) -> None:
    body = {
        "input_file_id": await upload(service, line("a", "x")),
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    with pytest.raises(openai.BadRequestError) as caught:
        await service.client.post("/batches", cast_to=openai.types.Batch, body=body | changed)
    assert param is None or caught.value.param == param


@with_service()
async def test_a_batch_of_a_file_that_is_not_there_is_not_made(service: Service) -> None:
    with pytest.raises(openai.NotFoundError):
        await service.client.batches.create(
            input_file_id="file-" + "0" * 24, endpoint="/v1/completions", completion_window="24h"
        )
