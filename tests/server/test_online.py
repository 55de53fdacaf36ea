"""Chat, completions, embeddings and models, with the official client."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from tests.server.conftest import Service, with_service

from batchwright.errors import EndpointError, EngineClosed, GenerationError, Overloaded


def _ask(text: str) -> list[openai.types.chat.ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


_X = [{"role": "user", "content": "x"}]


@with_service()
async def test_a_chat_is_answered_with_its_usage(service: Service) -> None:
    answer = await service.client.chat.completions.create(model="stub", messages=_ask("why is it so"))
    assert answer.choices[0].message.content == "WHY IS IT SO"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 4)


@with_service()
async def test_a_completion_and_embeddings_are_answered(service: Service) -> None:
    answer = await service.client.completions.create(model="stub", prompt=["a b", "c"], max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["A", "C"]
    vectors = await service.client.embeddings.create(model="stub", input=["ab", "abc"])
    assert [each.embedding for each in vectors.data] == [[2.0, 1.0], [3.0, 1.0]]


@with_service()
async def test_a_stream_comes_word_by_word_and_ends_with_done(service: Service) -> None:
    stream = await service.client.chat.completions.create(model="stub", messages=_ask("one two"), stream=True)
    words = [chunk.choices[0].delta.content async for chunk in stream]
    assert words == ["ONE ", "TWO ", None]
    body = {"prompt": "one two", "stream": True, "stream_options": {"include_usage": True}}
    answer = await service.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream"
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


@with_service()
async def test_a_stream_counts_its_tokens_though_nobody_asked_for_usage(service: Service) -> None:
    answer = await service.http.post("/v1/completions", json={"prompt": "one two", "stream": True})
    assert "usage" not in answer.text
    figures = service.services.inference.figures["online"]
    assert (figures.prompt_tokens, figures.generated_tokens, figures.ttft_ms.count) == (2, 2, 1)


@with_service()
async def test_the_first_error_of_a_stream_is_a_status_and_a_later_one_an_event(service: Service) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await service.client.chat.completions.create(model="stub", messages=_ask("x"), stream=True, temperature=99)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.InternalServerError):
        await service.client.chat.completions.create(model="stub", messages=_ask("fail now"), stream=True)
    stream = await service.client.chat.completions.create(model="stub", messages=_ask("a break b"), stream=True)
    words = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    assert words == ["A ", "BREAK "]
    with pytest.raises(openai.APIError, match="the stub broke"):
        await anext(stream)


@pytest.mark.parametrize("stream", [False, True])
@with_service()
async def test_who_hangs_up_has_their_request_cancelled_at_once(service: Service, stream: bool) -> None:
    body = {"prompt": "wait for ever", "stream": stream}
    request = json.dumps(body).encode()
    gone = asyncio.Event()
    messages = [{"type": "http.request", "body": request, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = _scope("/v1/completions")
    serving = asyncio.create_task(service.app(scope, receive, send))  # type: ignore[arg-type]
    await service.until(lambda: _true(service.stub.waiting == 1))
    assert service.services.online.inside == 1
    gone.set()
    await serving
    assert (service.stub.cancelled, service.stub.waiting, service.services.online.inside) == (1, 0, 0)
    assert not sent


@with_service()
async def test_who_hangs_up_in_mid_stream_frees_their_place(service: Service) -> None:
    gone = asyncio.Event()
    body = json.dumps({"prompt": "a pause b", "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("body", b""))  # type: ignore[arg-type]

    serving = asyncio.create_task(service.app(_scope("/v1/completions"), receive, send))  # type: ignore[arg-type]
    await service.until(lambda: _true(service.stub.waiting == 1))
    gone.set()
    await serving
    assert service.services.online.inside == 0
    assert service.services.inference.figures["online"].cancelled == 1
    assert b"PAUSE" in b"".join(sent)
    assert b"DONE" not in b"".join(sent)


def _scope(path: str) -> dict[str, object]:
    headers = [(b"host", b"127.0.0.1:8000"), (b"content-type", b"application/json")]
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip


async def _true(value: bool) -> bool:
    return value


@pytest.mark.parametrize(
    ("body", "kind", "param", "code"),
    [
        ({"model": "none", "messages": _X}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "messages", None),
        ({"messages": _X, "audio": {}}, openai.BadRequestError, "audio", "unsupported_parameter"),
        ({"messages": _X, "stream": "yes"}, openai.BadRequestError, "stream", None),
    ],
)
@with_service()
async def test_errors_become_the_clients_own_exceptions(
    service: Service, body: dict[str, object], kind: type[openai.APIStatusError], param: str, code: str | None
) -> None:
    with pytest.raises(kind) as caught:
        await service.client.post("/chat/completions", cast_to=dict[str, object], body=body)
    assert caught.value.param == param
    assert code is None or caught.value.code == code


@with_service()
async def test_what_the_model_raises_has_its_status(service: Service) -> None:
    seen = []
    for error in (
        Overloaded("full", retry_after=7.2),
        GenerationError("broke"),
        EngineClosed("gone"),
        EndpointError("not there"),
        EndpointError("slow down", status=429, body={"message": "slow down", "type": "x"}),
    ):
        service.stub.raises = error
        answer = await service.http.post("/v1/completions", json={"prompt": "x"})
        seen.append((answer.status_code, answer.headers.get("retry-after")))
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert seen == [(429, "8"), (500, None), (503, "5"), (502, "5"), (429, "5")]


@with_service(max_online_sequences=3)
async def test_more_than_the_most_are_sent_away_with_a_time(service: Service) -> None:
    waiting = [asyncio.create_task(service.http.post("/v1/completions", json={"prompt": "wait"})) for _ in range(2)]
    await service.until(lambda: _true(service.stub.waiting == 2))
    with pytest.raises(openai.RateLimitError) as caught:
        await service.client.completions.create(model="stub", prompt="x")
    assert int(caught.value.response.headers["retry-after"]) >= 1
    service.stub.go.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
    assert (await service.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


@with_service()
async def test_models_are_listed_and_found_by_name(service: Service) -> None:
    assert [model.id async for model in await service.client.models.list()] == ["stub", "org/other"]
    assert (await service.client.models.retrieve("org/other")).id == "org/other"
    with pytest.raises(openai.NotFoundError):
        await service.client.models.retrieve("none")


@with_service()
async def test_while_it_drains_who_is_inside_is_answered_and_who_comes_is_not(service: Service) -> None:
    inside = asyncio.create_task(service.http.post("/v1/completions", json={"prompt": "wait here"}))
    await service.until(lambda: _true(service.stub.waiting == 1))
    assert (await service.http.get("/ready")).status_code == 200
    service.services.drain()
    assert (await service.http.get("/ready")).status_code == 503
    assert (await service.http.get("/health")).status_code == 200
    refused = await service.http.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    service.stub.go.set()
    assert (await inside).json()["choices"][0]["text"] == "WAIT HERE"
