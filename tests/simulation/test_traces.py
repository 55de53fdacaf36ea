"""Traces in their forms: read, scaled, and refused with the line that is wrong."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import InputError
from batchwright.simulation.requests import SimulatedRequest, own_token
from batchwright.simulation.traces import drawn_lengths, poisson, rate_of, read_trace, with_rate

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00,0,5
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1100, "output_length": 500, "hash_ids": [7, 8, 9]}
{"timestamp": 27000, "input_length": 600, "output_length": 4, "hash_ids": [7, 10]}
"""
LOGGED = '{"at": 5.5, "prompt_tokens": 3, "output_tokens": 2}\n'


def test_azure() -> None:
    first, second = read_trace(AZURE.splitlines(keepends=True), "a.csv")
    assert (first.arrived_at, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.arrived_at == pytest.approx(4.314579)
    assert len(read_trace(AZURE.splitlines(), "a.csv", 1)) == 1


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("2024-05-10 00:00:00.0099307+00:00", 0.00993),
        ("2024-05-10 00:00:00.5", 0.5),
        ("2024-05-10 02:00:03+02:00", 3.0),
        ("2024-05-10T00:00:03Z", 3.0),
        ("2024-05-09 19:00:03.25-05:00", 3.25),
    ],
)
def test_times_have_the_offset_that_they_name(stamp: str, seconds: float) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00,1,1", f"{stamp},2,1"]
    assert read_trace(lines, "a.csv")[1].arrived_at == pytest.approx(seconds, abs=1e-6)


def test_mooncake_prompts_share_what_their_ids_share() -> None:
    first, second = read_trace(MOONCAKE.splitlines(), "m.jsonl")
    assert second.arrived_at == 26.5
    ours, others = first.tokens(0), second.tokens(1)
    assert (len(ours), len(others)) == (1100, 600)
    assert ours[:512] == others[:512]
    assert not set(ours[512:]) & set(others[512:])
    keys, other_keys = first.prefix_keys, second.prefix_keys
    assert (len(keys), len(other_keys)) == (16, 8)
    assert keys[:8] == other_keys[:8]


def test_our_own_log() -> None:
    lines = [
        '{"at":1700000000.25,"class":"online","prompt_tokens":100,"cached_tokens":48,"output_tokens":20}\n',
        '{"at":1700000001,"class":"batch","prompt_tokens":50,"cached_tokens":0,"output_tokens":1}\n',
        '{"at":1700000002,"prompt_tokens":64,"cached_tokens":64,"outp',
    ]
    first, second = read_trace(lines, "log")
    assert (first.arrived_at, second.arrived_at) == (0.0, 0.75)
    assert (first.traffic, second.traffic) == ("online", "batch")
    assert first.tokens(0) == [*range(1), *[0] * 15, *[1] * 16, *[2] * 16, *[own_token(0)] * 52]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("", "no column"),
        ("a,b,c\n1,2,3\n", "no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "line 2"),
        ("ContextTokens,GeneratedTokens,TIMESTAMP\n10,20\n", "line 2: it has no TIMESTAMP"),
        (f"{AZURE}{'x' * 200_000},1,2\n", "line 5: field larger than"),
        ("x" * 200_000, "line 1: field larger than"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ('{"timestamp": 0, "input_length": -1, "output_length": 2, "hash_ids": []}', "input_length=-1"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": "x"}', "hash_ids"),
        (
            '{"timestamp": 0, "input_length": 1000, "output_length": 2, "hash_ids": [7]}',
            r"line 1: hash_ids=\[7\]: must be 2 of them, not 1: .* of input_length=1000",
        ),
        ('{"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [7, 8]}', "must be 1 of them, not 2"),
        (
            f'{LOGGED}{{"at": 0, "prompt_tokens": 40, "cached_tokens": 41, "output_tokens": 2}}',
            "line 2: cached_tokens=41: must be at most prompt_tokens=40",
        ),
        ('{"at": 0, "prompt_tokens": true, "output_tokens": 2}', "prompt_tokens"),
        ('{"at": 0, "prompt_tokens": 1, "output_tokens": 2, "class": "other"}', "class='other'"),
        ('{"at": 0, "prompt_tokens": 1}', "output_tokens=None"),
        (
            '{"prompt": "Write a poem"}',
            r"trace.x is no trace: line 1 has no field of one; known are CSV with TIMESTAMP, .*, and JSON Lines "
            "with timestamp, .* or at, prompt_tokens, output_tokens; prompts are a --job",
        ),
        ('{"timestamp": 0, "output_length": 2}', "is no trace: line 1 has no field of one"),
        ('{"prompt_tokens": 1, "output_tokens": 2}', "line 1: at=None: must be a number"),
        (f"{LOGGED}garbage here", "line 2: JSON is malformed"),
        (f"{LOGGED}[1,2]", "line 2: .* must be an object"),
        (f"{LOGGED}{LOGGED.rstrip()},", "line 2: JSON is malformed"),
        (f'{{"at": {"9" * 400}, "prompt_tokens": 1, "output_tokens": 2}}', "line 1: at=9+.*number from 0 to"),
        (f'{{"timestamp": {"9" * 400}, "input_length": 1, "output_length": 2}}', "line 1: timestamp=9+"),
        ('{"at": 0, "prompt_tokens": 1e13, "cached_tokens": 1e13, "output_tokens": 1}', "prompt_tokens=10+.0: must"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1e3,2\n",
            "ContextTokens='1e3': must be",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nabc,1,2\n", "line 2: TIMESTAMP='abc': must be a date"),
        (f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,{'9' * 5000},2\n", "line 2: ContextTokens="),
    ],
)
def test_what_is_no_trace_is_refused_by_name(lines: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_trace(lines.splitlines(), "trace.x")


times = st.lists(st.floats(0.0, 1e6), min_size=2, max_size=50)


@given(times, st.floats(0.01, 100.0))
def test_times_are_stretched_to_a_rate(arrivals: list[float], rate: float) -> None:
    requests = [SimulatedRequest(arrived_at=at, prompt_tokens=1, output_tokens=1) for at in sorted(arrivals)]
    scaled = with_rate(requests, rate)
    if math.isfinite(rate_of(requests)) and rate_of(requests) < 1e6:
        assert rate_of(scaled) == pytest.approx(rate)
    assert [each.arrived_at for each in scaled] == sorted(each.arrived_at for each in scaled)


def test_a_rate_is_that_of_online_requests() -> None:
    lines = [
        f'{{"at": {at}, "class": "{kind}", "prompt_tokens": 5, "output_tokens": 2}}'
        for at, kind in [(0, "batch"), (1, "online"), (2, "batch"), (3, "online"), (5, "online"), (6, "batch")]
    ]
    found = read_trace(lines, "log")
    assert rate_of(found) == pytest.approx(0.5)
    assert [each.arrived_at for each in with_rate(found, 5.0)] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.5, 0.6])
    at_random = poisson(found, 5.0, 1)
    batch = [(each, moved) for each, moved in zip(found, at_random, strict=True) if each.traffic == "batch"]
    assert all(each == moved for each, moved in batch)
    online = [each.arrived_at for each in at_random if each.traffic == "online"]
    assert online == sorted(online)
    assert online != [1.0, 3.0, 5.0]


def test_so_many_requests_are_read_whatever_lines_have_no_answer() -> None:
    lines = [f'{{"at": {at}, "prompt_tokens": 5, "output_tokens": {at % 2}}}' for at in range(20)]
    assert [each.arrived_at for each in read_trace(lines, "log", 5)] == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_line_that_was_being_written_is_left_out() -> None:
    line = '{"at":1732.5e-3,"class":"online","prompt_tokens":3,"cached_tokens":0,"output_tokens":2}'
    torn = [line[:length] + "\n" for length in range(len(line))]
    assert len(read_trace([line, *torn, "\0" * 30, line, line[:-1]], "log")) == 2


def test_times_and_lengths_are_drawn_apart() -> None:
    requests = poisson(drawn_lengths(200, 1000.0, 1000.0, 3), 1.0, 3)
    gaps = [after.arrived_at - before.arrived_at for before, after in pairwise(requests)]
    lengths = [length for each in requests for length in (each.prompt_tokens, each.output_tokens)]
    assert abs(statistics.correlation(gaps, lengths[1:200])) < 0.2
    assert abs(statistics.correlation(gaps, [each.prompt_tokens for each in requests[1:]])) < 0.2


@pytest.mark.parametrize("size", [16, 32, 48, 64, 512])
def test_keys_of_prefixes_are_equal_as_far_as_prompts_are(size: int) -> None:
    def keys(*blocks: int) -> tuple[int, ...]:
        request = SimulatedRequest(
            prompt_tokens=len(blocks) * size + 5, output_tokens=1, blocks=blocks, block_tokens=size
        )
        return request.prefix_keys

    shared = 3072 // size  # blocks
    first, second = keys(*range(shared), 7001), keys(*range(shared), 7002)
    assert len(first) == (shared + 1) * size // 64
    alike = [one == other for one, other in zip(first, second, strict=True)]
    assert alike == [number < 48 for number in range(len(first))]
    assert len({*first, *second}) == len(first) + len(second) - 48
    assert not set(keys(9, *range(1, shared))) & set(first)


def test_what_is_drawn_has_its_means_and_is_the_same_again() -> None:
    found = poisson(drawn_lengths(2000, 300.0, 50.0, 1), 4.0, 2)
    assert found == poisson(drawn_lengths(2000, 300.0, 50.0, 1), 4.0, 2)
    assert sum(each.prompt_tokens for each in found) / 2000 == pytest.approx(300, rel=0.1)
    assert sum(each.output_tokens for each in found) / 2000 == pytest.approx(50, rel=0.1)
    assert found[-1].arrived_at == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize("wrong", [{"prompt_tokens": 0}, {"output_tokens": 0}, {"arrived_at": -1.0}])
def test_a_request_has_tokens_and_a_time(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        SimulatedRequest(**({"prompt_tokens": 1, "output_tokens": 1} | wrong))  # type: ignore[arg-type]
