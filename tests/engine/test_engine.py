"""What `Engine` promises its callers, with the real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from batchwright import Engine, InferenceRequest, InferenceResponse, SamplingParams, StreamEvent
from batchwright.engine.bodies.linear import make_linear, rounds_by_company
from batchwright.errors import Cancelled, EngineClosed

from .support import GREEDY, LIST, STORY, final, joined, nothing_left, only

# Prompts and responses


def test_responses_come_in_the_order_of_the_prompts(engine: Engine) -> None:
    prompts = [STORY, LIST, "2 + 2 =", STORY]
    params = [replace(GREEDY, max_tokens=count) for count in (12, 2, 7, 1)]
    together = engine.generate(prompts, params)
    assert [response.tokens_generated for response in together] == [12, 2, 7, 1]
    for prompt, each, response in zip(prompts, params, together, strict=True):
        assert only(engine.generate(prompt, each)).output == response.output
    assert together[0].output.startswith(together[3].output)


def test_text_token_ids_and_messages(engine: Engine) -> None:
    tokenizer = engine.core.tokenizer
    messages = [{"role": "user", "content": "Say hello."}]
    ids = tokenizer.encode(messages)
    assert engine.generate(STORY, GREEDY)[0].token_ids == engine.generate(tokenizer.encode(STORY), GREEDY)[0].token_ids
    assert engine.generate(messages, GREEDY)[0].token_ids == engine.generate(ids, GREEDY)[0].token_ids
    mixed: list[Any] = [STORY, ids, messages]
    assert [response.usage.prompt_tokens for response in engine.generate(mixed, GREEDY)] == [
        len(tokenizer.encode(STORY)),
        len(ids),
        len(ids),
    ]
    assert engine.generate([], GREEDY) == []


def test_what_a_response_holds(engine: Engine) -> None:
    request = InferenceRequest(STORY, max_tokens=5, temperature=0.0, metadata={"row": 3}, request_id="mine")
    response = only(engine.generate([request]))
    assert (response.request_id, response.metadata, response.error) == ("mine", {"row": 3}, None)
    assert response.finish_reason == "length"
    assert response.tokens_generated == len(response.token_ids) == response.usage.completion_tokens == 5
    assert response.output == engine.core.tokenizer.decode(response.token_ids)
    assert response.ttft_ms is not None
    assert 0 <= response.queue_ms <= response.ttft_ms <= response.latency_ms
    assert response.usage.total_tokens == response.usage.prompt_tokens + 5
    (choice,) = response.choices
    assert (choice.text, choice.token_ids, choice.index) == (response.output, response.token_ids, 0)
    assert choice.logprobs is None


def test_several_completions(engine: Engine) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=4, ignore_eos=True)
    response = only(engine.generate(STORY, params))
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in response.choices}) == 4
    assert response.tokens_generated == 32
    assert response.output == response.choices[0].text
    one = only(engine.generate(STORY, replace(params, n=1)))
    assert one.token_ids == response.choices[0].token_ids


# How a completion ends


def test_end_of_text(engine: Engine) -> None:
    (end,) = engine.core.tokenizer.eos_token_ids & set(range(3)) or {2}
    force = {end: 100.0}
    stopped = only(engine.generate(STORY, replace(GREEDY, logit_bias=force)))
    assert (stopped.finish_reason, stopped.token_ids, stopped.output) == ("stop", (end,), "")
    later = only(engine.generate(STORY, replace(GREEDY, logit_bias=force, min_tokens=4)))
    assert later.finish_reason == "stop"
    assert len(later.token_ids) == 5
    assert end not in later.token_ids[:4]
    ignored = only(engine.generate(STORY, replace(GREEDY, logit_bias=force, ignore_eos=True)))
    assert (ignored.finish_reason, ignored.token_ids) == ("length", (end,) * 12)
    assert ignored.output == ""


def test_stop_token_ids(engine: Engine) -> None:
    free = only(engine.generate(STORY, GREEDY))
    third = free.token_ids[2]
    response = only(engine.generate(STORY, replace(GREEDY, stop_token_ids=(third,))))
    first = free.token_ids.index(third)
    assert response.finish_reason == "stop"
    assert response.token_ids == free.token_ids[: first + 1]
    assert response.output == engine.core.tokenizer.decode(free.token_ids[:first])


def test_stop_strings_spanning_tokens(engine: Engine) -> None:
    free = only(engine.generate(STORY, replace(GREEDY, max_tokens=20)))
    stops = [free.output[start : start + 4] for start in range(1, len(free.output) - 4, 9)]
    params = [replace(GREEDY, max_tokens=20, stop=("never there", stop)) for stop in stops]
    requests = [InferenceRequest.of(STORY, each) for each in params]
    streamed: dict[str, list[StreamEvent]] = {request.request_id: [] for request in requests}
    for event in engine.stream(requests):
        streamed[event.request_id].append(event)
    responses = engine.generate([STORY] * len(stops), params)
    for stop, response, events in zip(stops, responses, streamed.values(), strict=True):
        wanted = free.output[: free.output.find(stop)]
        assert joined(events) == wanted
        for each in (response, final(events)):
            assert (each.output, each.finish_reason) == (wanted, "stop")
            assert free.token_ids[: len(each.token_ids)] == each.token_ids


def test_a_stop_string_is_not_honoured_before_min_tokens(engine: Engine) -> None:
    free = only(engine.generate(LIST, GREEDY))
    params = replace(GREEDY, stop=(" ",), min_tokens=6)
    events = list(engine.stream(LIST, params))
    response = final(events)
    assert len(response.token_ids) >= 6
    assert joined(events) == response.output == only(engine.generate(LIST, params)).output
    sixth = len(engine.core.tokenizer.decode(free.token_ids[:5]))
    assert response.output == free.output[: free.output.find(" ", sixth)]


def test_what_might_have_become_a_stop_string_is_given_at_the_end(engine: Engine) -> None:
    free = only(engine.generate(STORY, GREEDY))
    events = list(engine.stream(STORY, replace(GREEDY, stop=(free.output[-3:] + "§",))))
    assert joined(events) == final(events).output == free.output


def test_logprobs(engine: Engine) -> None:
    plain = only(engine.generate(STORY, GREEDY))
    response = only(engine.generate(STORY, replace(GREEDY, logprobs=3)))
    assert response.token_ids == plain.token_ids
    logprobs = response.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == list(response.token_ids)
    assert "".join(entry.token for entry in logprobs) == response.output
    for entry in logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.token, entry.logprob)
        assert entry.logprob <= 0
    (own,) = engine.generate(STORY, replace(GREEDY, logprobs=0))[0].choices
    assert own.logprobs is not None
    assert [entry.logprob for entry in own.logprobs] == pytest.approx([e.logprob for e in logprobs], abs=1e-5)


# Streaming


def test_streams_equal_what_generate_gives(engine: Engine) -> None:
    prompts = [STORY, LIST, "🦊🌲 are", "日本語で"]
    params = SamplingParams(max_tokens=25, temperature=0.9, seed=3, ignore_eos=True)
    whole = engine.generate(prompts, params)
    ids: list[str] = []
    events: dict[str, list[StreamEvent]] = {}
    for event in engine.stream(prompts, params):
        events.setdefault(event.request_id, []).append(event)
    for response in (final(each) for each in events.values()):
        ids.append(response.request_id)
        texts, tokens = joined(events[response.request_id]), events[response.request_id]
        assert texts == response.output
        assert sum((event.token_ids for event in tokens), ()) == response.token_ids
        assert response.output in [each.output for each in whole]
    assert len(ids) == 4


def test_several_completions_in_a_stream(engine: Engine) -> None:
    params = SamplingParams(max_tokens=10, temperature=1.2, seed=8, n=3)
    events = list(engine.stream(STORY, params))
    response = final(events)
    for choice in response.choices:
        assert joined(events, choice.index) == choice.text
        ends = [event.finish_reason for event in events if event.index == choice.index and event.finish_reason]
        assert ends == [choice.finish_reason]


def test_characters_of_many_bytes_are_never_split(engine: Engine) -> None:
    """Forced to spell characters byte by byte, the stream gives each of them whole."""
    text = "a🦊日本é👩‍👩‍👧 ok"
    ids = engine.core.tokenizer.encode(text)
    assert len(ids) > len(text)
    forced: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        force_tokens(patch, engine, ids, forced)
        events = list(engine.stream(STORY, replace(GREEDY, max_tokens=len(ids), ignore_eos=True)))
    assert forced == ids
    assert joined(events) == final(events).output == text
    assert all("\ufffd" not in event.text for event in events)
    assert any(event.text == "" for event in events)


def force_tokens(patch: pytest.MonkeyPatch, engine: Engine, ids: list[int], forced: list[int]) -> None:
    """Whatever is computed, the logits call for `ids`, one after another."""
    own = engine.core.body.forward

    def forward(batch: Any) -> Any:
        logits = own(batch)
        if len(logits):
            logits[:] = 0
            logits[:, ids[len(forced)]] = 10
            forced.append(ids[len(forced)])
        return logits

    patch.setattr(engine.core.body, "forward", forward)


@pytest.mark.parametrize("missing", [1, 2])
def test_half_a_character_at_the_end_is_dropped(engine: Engine, missing: int) -> None:
    whole = engine.core.tokenizer.encode("ok 🦡")
    ids = whole[:-missing]
    assert engine.core.tokenizer.decode(ids).endswith("\ufffd")
    for stream in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            force_tokens(patch, engine, ids, [])
            params = replace(GREEDY, max_tokens=len(ids))
            response = final(list(engine.stream(STORY, params))) if stream else only(engine.generate(STORY, params))
        assert response.output == "ok"
        assert response.token_ids == tuple(ids)


def test_leaving_a_stream_early_cancels(engine: Engine) -> None:
    responses: list[InferenceResponse] = []
    request = InferenceRequest(STORY, max_tokens=100, callback=responses.append)
    events = engine.stream([request, InferenceRequest(LIST, max_tokens=100)])
    next(events)
    events.close()  # type: ignore[attr-defined]  # it is a generator
    assert isinstance(only(responses).error, Cancelled)


# Life and memory


def test_close(shallow_path: Path) -> None:
    got: list[InferenceResponse] = []
    engine = Engine(shallow_path, dtype="float32", kv_memory="20MB")
    engine.submit(InferenceRequest(STORY, max_tokens=50, callback=got.append))
    engine.step()
    events = engine.stream(LIST, GREEDY)
    next(events)
    # A step that had been launched came before the prompt of the second one.
    later = int(engine.core.launcher.runs_ahead)
    engine.close()
    engine.close()
    assert isinstance(only(got).error, EngineClosed)
    assert only(got).tokens_generated == 2 + later
    assert engine.stats.generated_tokens == 3 + later
    with pytest.raises(EngineClosed):
        next(events)
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate(STORY),
        lambda: next(iter(engine.stream(STORY))),
        lambda: engine.submit(InferenceRequest(STORY)),
        engine.step,
        lambda: engine.cancel("x"),
    ]
    for call in calls:
        with pytest.raises(EngineClosed):
            call()


def test_hundreds_of_requests_leave_nothing_behind(shallow_path: Path) -> None:
    kv_memory = 3_000_000
    with Engine(shallow_path, kv_memory=kv_memory, max_num_seqs=32) as engine:
        caches = engine.core.body.caches
        assert sum(c.keys.nbytes + c.values.nbytes for c in caches) <= kv_memory
        params = SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True)
        responses = engine.generate([[index % 97 + 5, index % 89 + 5, 7] for index in range(500)], params)
        assert all(response.error is None for response in responses)
        assert nothing_left(engine)
        scheduler = engine.core.scheduler
        assert scheduler._places.waiting["online"].num_entries <= 100
        assert len(scheduler._timetable) <= 100
        assert engine.stats.kv_blocks_peak <= engine.stats.kv_blocks


def test_stats(shallow_path: Path) -> None:
    with Engine(shallow_path, dtype="float32", kv_memory="40MB", max_batch_tokens=64) as engine:
        prompts = [[7 + index % 2, *range(100, 160)] for index in range(6)]
        responses = engine.generate(prompts, replace(GREEDY, ignore_eos=True))
        stats = engine.stats
        assert stats.prompt_tokens == sum(response.usage.prompt_tokens for response in responses) == 6 * 61
        assert stats.generated_tokens == sum(response.tokens_generated for response in responses) == 72
        assert stats.cached_tokens == sum(response.usage.cached_tokens for response in responses) > 0
        assert stats.prefill_tokens == stats.prompt_tokens - stats.cached_tokens
        assert stats.decode_tokens == 72 - 6
        assert stats.rows_computed == stats.prefill_tokens + stats.decode_tokens
        assert stats.padding_efficiency == 1.0
        assert 1 <= stats.occupancy_mean <= stats.occupancy_peak <= 6
        assert stats.ttft_ms.count == stats.tpot_ms.count == stats.latency_ms.count == 6
        assert stats.preemptions == 0
        engine.generate([[5]], replace(GREEDY, max_tokens=2, ignore_eos=True))
        twice = 2 if engine.core.body.device.type == "cpu" else 0
        assert stats.rows_computed == stats.prefill_tokens + stats.decode_tokens + twice, (
            "single rows are computed twice on a CPU"
        )
        assert stats.padding_efficiency < 1.0
        assert 0 < stats.model_seconds <= stats.step_seconds
        assert stats.prefill_seconds + stats.decode_seconds == pytest.approx(stats.model_seconds)


class Ticking:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def now(self) -> float:
        self.reads += 1
        return float(self.reads)


def test_time_per_token_is_each_completions_own(shallow_path: Path) -> None:
    """Two completions of one request: the short one's pace is not counted to the end of the long one."""
    clock = Ticking()
    with Engine(shallow_path, dtype="float32", kv_memory="40MB", clock=clock) as engine:
        params = replace(GREEDY, n=2, max_tokens=20, stop_token_ids=tuple(range(0, 49152, 7)), temperature=1.0, seed=1)
        response = only(engine.generate(STORY, params))
        lengths = sorted(len(choice.token_ids) for choice in response.choices)
        assert lengths[0] > 1
        assert lengths[0] < lengths[1]
        slowest = engine.stats.tpot_ms.maximum
        fastest = engine.stats.tpot_ms.percentile(0)
        assert fastest is not None
        assert slowest < 1.2 * fastest, "every step reads the clock equally often"


def test_token_ids_may_be_of_any_whole_number_type(engine: Engine) -> None:
    ids = [7, 8, 900]
    assert only(engine.generate(list(np.array(ids)), GREEDY)).token_ids == only(engine.generate(ids, GREEDY)).token_ids


# Seeds


def _require_rows_rounded_alone(dtype: torch.dtype) -> None:
    """Skip where torch's products round a row differently in company, as bfloat16 ones do with AMX."""
    weight = torch.randn(1536, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    for product in (make_linear(weight), partial(functional.linear, weight=weight)):
        if (rows := rounds_by_company(product, 576, dtype, 512)) is not None:
            pytest.skip(f"torch's products on this processor round a row of {rows} differently from one among 512")


@pytest.mark.parametrize("body", ["fused", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_gives_the_same_tokens_alone_and_in_company(shallow_path: Path, dtype: str, body: str) -> None:
    prompts = [STORY, LIST, "def add(a, b):", "The sea", STORY]
    params = [
        SamplingParams(max_tokens=8, temperature=1.0, seed=11, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.4, seed=12, top_p=0.95, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=0.8, seed=13, top_k=50, repetition_penalty=1.2, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.1, seed=14, min_p=0.02, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=8, temperature=1.0, seed=15, ignore_eos=True),
    ]
    with Engine(shallow_path, dtype=dtype, body=body, kv_memory="40MB", prefix_caching=False) as engine:
        if "compiled products" not in engine.stats.implementation:
            _require_rows_rounded_alone(getattr(torch, dtype))
        alone = [only(engine.generate(prompt, each)).token_ids for prompt, each in zip(prompts, params, strict=True)]
        assert [response.token_ids for response in engine.generate(prompts, params)] == alone
        strangers = ["Elsewhere", "x = 1\n" * 30] * 4
        noise = [SamplingParams(max_tokens=8, temperature=1.5)] * 8
        mixed = engine.generate([*strangers, *reversed(prompts)], [*noise, *reversed(params)])
        assert [response.token_ids for response in reversed(mixed[8:])] == alone
    assert alone[0] != alone[4]


def test_a_bar_is_shown_on_request(
    shallow_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Engine(shallow_path, dtype="float32", kv_memory="20MB") as engine:
        quiet = engine.generate(["a", "b"], GREEDY)
        assert capsys.readouterr().err == ""
        shown = engine.generate(["a", "b"], GREEDY, progress=True)
    assert [each.output for each in shown] == [each.output for each in quiet]
    assert "2/2" in capsys.readouterr().err
