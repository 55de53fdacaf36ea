"""Several endpoints that share calls, over real connections: who gets them, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from batchwright.errors import EndpointDown, EndpointError, InvalidRequest, ModelNotFound
from batchwright.inference.calls import closing
from batchwright.inference.endpoint import EndpointInference
from batchwright.inference.endpoint_pool import EndpointPool
from batchwright.inference.inference import Call, pacing_of, send_no_more
from batchwright.inference.routing import RoutedInference, StandIn
from batchwright.pacing.limits import configured_limits
from batchwright.service.observability.figures import endpoint_figures

from .running import in_real_time, until
from .scripted import CHAT, Reply, Request, Script, ScriptedServer, events, refusal

MESSAGES = [{"role": "user", "content": "Hello"}]


def call(**body: Any) -> Call:
    return Call("/v1/chat/completions", {"messages": MESSAGES} | body, "req_1", "batch", None)


@asynccontextmanager
async def pool_of(
    *scripts: Sequence[Script], models: Sequence[Sequence[str]] = (), told: Sequence[float | None] = ()
) -> AsyncIterator[tuple[list[ScriptedServer], EndpointPool, list[EndpointInference]]]:
    """A pool with a server for each script, which lists `models`, and has a told limit a minute."""
    async with AsyncExitStack() as stack:
        servers, members = [], []
        for number, script in enumerate(scripts):
            server = await stack.enter_async_context(ScriptedServer(*script))
            if models:
                listed = {"object": "list", "data": [{"id": name} for name in models[number]]}
                server.models = Reply(content=json.dumps(listed).encode())
            rpm = told[number] if told else None
            member = EndpointInference(
                server.url, f"key-{number}", limits=configured_limits(rpm=rpm), first_concurrency=4
            )
            await member.discover(waits=False)
            servers.append(server)
            members.append(member)
        pool = EndpointPool(members)
        try:
            yield servers, pool, members
        finally:
            await pool.close()


def test_a_pool_without_members_is_none() -> None:
    with pytest.raises(ValueError, match="members: give at least one"):
        EndpointPool([])


@in_real_time
async def test_calls_go_to_who_can_send_them_soonest() -> None:
    async with pool_of([], [], told=(60.0, None)) as (servers, pool, members):
        assert pool.room == sum(member.room for member in members) > 0
        for _ in range(10):
            await pool.answer(call())
        # The first one may be sent a request a second.
        assert [len(server.requests) for server in servers] in ([1, 9], [0, 10])
        named = [*pool.pacing()]
        assert named[-1] == f"2 {members[1].address} theirs"
        assert members[0].address == servers[0].url


@in_real_time
async def test_each_member_sends_its_own_key_and_all_have_what_the_pool_serves() -> None:
    async def wait(request: Request) -> Reply:
        await asyncio.sleep(0.05)
        return Reply()

    async with pool_of([wait] * 9, [wait] * 9, models=(["a", "b"], ["c", "b"])) as (servers, pool, _):
        assert pool.models == ["b"]
        assert set(pool.endpoints) >= {"/v1/chat/completions", "/v1/embeddings"}
        answers = await asyncio.gather(*(pool.answer(call()) for _ in range(8)))
        assert {answer["model"] for answer in answers} == {"b"}
        for number, server in enumerate(servers):
            assert server.requests
            assert {each.headers["authorization"] for each in server.requests} == {f"bearer key-{number}"}
            assert {each.body["model"] for each in server.requests} == {"b"}, (
                "the first that both have, where none is named"
            )


@in_real_time
async def test_a_model_that_only_one_has_is_asked_there() -> None:
    async with pool_of([], [], models=(["a", "b"], ["c", "b"])) as (servers, pool, _):
        answers = [await pool.answer(call(model=model)) for model in "aacc"]
        assert [answer["model"] for answer in answers] == [*"aacc"]
        asked = [Counter(each.body["model"] for each in server.requests) for server in servers]
        assert asked == [{"a": 2}, {"c": 2}]
        with pytest.raises(ModelNotFound, match="'d' is not served here"):
            await pool.answer(call(model="d"))
        with pytest.raises(InvalidRequest, match="must be the name of a model"):
            await pool.answer(call(model=3))


@pytest.mark.parametrize(
    "reply",
    [refusal(401), refusal(403), refusal(402), refusal(429, code="insufficient_quota")],
    ids=lambda each: each.status,
)
@in_real_time
async def test_one_that_refuses_its_key_or_wants_money_gets_no_more(reply: Reply) -> None:
    async with pool_of([reply] * 20, []) as (servers, pool, members):
        await asyncio.gather(*(pool.answer(call()) for _ in range(8)))
        asked = len(servers[0].requests)
        assert 1 <= asked <= 8
        for _ in range(4):
            await pool.answer(call())
        assert (len(servers[0].requests), len(servers[1].requests)) == (asked, 12)
        assert pool.room == members[1].room


NO_MODEL = refusal(404, "The model `theirs` does not exist or you do not have access to it.", code="model_not_found")
NO_PATH = Reply(404, b'{"detail": "Not Found"}')


@pytest.mark.parametrize(
    "reply",
    [NO_MODEL, NO_PATH, refusal(403, code="model_not_found"), refusal(400, "Model Not Exist"), Reply(404, b"")],
    ids=["model", "path", "403", "400", "empty"],
)
@in_real_time
async def test_one_without_the_model_or_without_the_api_gets_no_more(reply: Reply) -> None:
    async with pool_of([reply] * 20, []) as (servers, pool, members):
        await asyncio.gather(*(pool.answer(call()) for _ in range(8)))
        asked = len(servers[0].requests)
        assert 1 <= asked <= 8
        for _ in range(4):
            await pool.answer(call())
        assert (len(servers[0].requests), len(servers[1].requests)) == (asked, 12)
        assert pool.room == members[1].room


@in_real_time
async def test_a_model_that_none_has_costs_no_member() -> None:
    async def reply(request: Request) -> Reply:
        return NO_MODEL if request.body["model"] == "no" else Reply()

    async with pool_of([reply] * 20, [reply] * 20) as (servers, _, members):
        for member in members:
            member._theirs = {}  # as of one without a list of models
        pool = EndpointPool(members)
        for _ in range(3):
            with pytest.raises(EndpointError) as raised:
                await pool.answer(call(model="no"))
            assert raised.value.status == 404
            await pool.answer(call(model="yes"))
        assert Counter(each.body["model"] for server in servers for each in server.requests) == {"no": 4, "yes": 3}
        assert pool.room == sum(member.room for member in members)


@in_real_time
async def test_the_error_of_the_last_one_is_that_of_the_call() -> None:
    async with pool_of([refusal(401)] * 5, [refusal(401)] * 5) as (servers, pool, _):
        for _ in range(2):
            with pytest.raises(EndpointError) as raised:
                await pool.answer(call())
            assert raised.value.status == 401
        assert [len(server.requests) for server in servers] in ([1, 2], [2, 1])


@in_real_time
async def test_what_is_forbidden_of_one_call_costs_no_member() -> None:
    forbidden = refusal(403, "flagged by moderation")
    async with pool_of([Reply(), forbidden], [Reply(), forbidden], models=(["a"], ["b"])) as (servers, pool, _):
        for model in "ab":
            await pool.answer(call(model=model))
            with pytest.raises(EndpointError) as raised:
                await pool.answer(call(model=model))
            assert raised.value.status == 403
            await pool.answer(call(model=model))
        assert [len(server.requests) for server in servers] == [3, 3]


@in_real_time
async def test_an_error_of_a_call_is_not_asked_elsewhere() -> None:
    async with pool_of([refusal(400)], [refusal(400)]) as (servers, pool, _):
        with pytest.raises(EndpointError):
            await pool.answer(call())
        assert sum(len(server.requests) for server in servers) == 1


@in_real_time
async def test_the_calls_of_one_that_goes_down_are_answered_by_the_others() -> None:
    stays = asyncio.Event()

    async def wait(request: Request) -> Reply:
        await stays.wait()
        return Reply()

    async with pool_of([wait] * 40, [wait] * 40) as (servers, pool, members):
        tasks = [asyncio.ensure_future(pool.answer(call())) for _ in range(8)]
        await until(lambda: all(server.requests for server in servers))
        servers[0].hang_up()
        await until(lambda: members[0].why_not_ready is not None)
        stays.set()
        answers = await asyncio.gather(*tasks)
        assert len(answers) == 8
        assert pool.why_not_ready is None
        assert pool.room == members[1].room
        servers[1].hang_up()
        with pytest.raises(EndpointDown):
            await pool.answer(call())
        assert pool.why_not_ready == members[0].why_not_ready
        assert pool.room <= 0


@in_real_time
async def test_a_call_for_a_model_that_only_the_one_that_is_down_has_is_given_back() -> None:
    async with pool_of([], [], models=(["a"], ["b"])) as (servers, pool, members):
        servers[0].hang_up()
        for _ in range(2):
            with pytest.raises((EndpointDown, EndpointError)):
                await asyncio.wait_for(pool.answer(call(model="a")), 20)
        assert members[0].why_not_ready is not None
        with pytest.raises(EndpointDown):
            await pool.answer(call(model="a"))
        await pool.answer(call(model="b"))


@in_real_time
async def test_streams_are_begun_elsewhere_but_not_twice() -> None:
    chunk = CHAT | {"object": "chat.completion.chunk"}
    broken = events(chunk, {"error": {"message": "no more", "code": "insufficient_quota"}})
    async with pool_of([refusal(401)] * 4, [events(chunk), broken]) as (servers, pool, members):
        async with closing(pool.stream(call())) as chunks:
            assert len([each async for each in chunks]) == 1
        async with closing(pool.stream(call())) as chunks:
            await anext(chunks)
            with pytest.raises(EndpointError, match="no more"):
                await anext(chunks)
        assert sum(member._under_way for member in members) == 0
        assert len(servers[1].requests) == 2


@in_real_time
async def test_when_no_more_is_sent_calls_come_back_from_all() -> None:
    async def wait(request: Request) -> Reply:
        await asyncio.sleep(0.2)
        return Reply()

    async with pool_of([wait] * 40, [wait] * 40) as (servers, pool, members):
        tasks = [asyncio.ensure_future(pool.answer(call())) for _ in range(40)]
        await until(lambda: sum(len(server.requests) for server in servers) >= 8)
        pool.send_no_more()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        sent = sum(len(server.requests) for server in servers)
        assert sum(isinstance(each, dict) for each in outcomes) == sent
        assert sum(isinstance(each, EndpointDown) for each in outcomes) == 40 - sent > 0
        assert sum(member._held.total() for member in members) == 0


@in_real_time
async def test_what_routes_found_is_told_together() -> None:
    async with pool_of([], [], models=[["a"], ["b"]]) as (_, _, members):
        routed = RoutedInference(members)
        assert pacing_of(routed) == {}
        await routed.answer(call(model="a"))
        assert [*pacing_of(routed)] == ["a"]
        await routed.answer(call(model="b"))
        assert [*pacing_of(routed)] == ["1 a", "2 b"]
        assert [*pacing_of(StandIn(routed, ["c"]))] == ["1 a", "2 b"]
        assert [(address, model) for address, model, _ in endpoint_figures(routed)] == [
            (members[0].address, "a"),
            (members[1].address, "b"),
        ]
        send_no_more(routed)
        with pytest.raises(EndpointDown):
            await routed.answer(call(model="b"))
