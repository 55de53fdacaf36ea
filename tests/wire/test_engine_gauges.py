"""What is read of the metrics of engines, in the forms in which they show them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.wire.engine_gauges import Queue, queue_of, slots_of

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta-llama/Llama-3.1-8B"} 12.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta-llama/Llama-3.1-8B"} 3.0
vllm:gpu_cache_usage_perc{engine="0",model_name="meta-llama/Llama-3.1-8B"} 0.25
"""
SGLANG = """sglang:num_running_reqs{engine_type="unified",model_name="a",tp_rank="0"} 162.0
sglang:num_queue_reqs{engine_type="unified",model_name="a",tp_rank="0"} 2826.0
sglang:token_usage{model_name="a"} 0.28
"""
LLAMA_CPP = """# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""
TGI = "tgi_batch_current_size 7\ntgi_queue_size 2\n"


@pytest.mark.parametrize(
    ("metrics", "queue"),
    [
        (VLLM, Queue(12, 3)),
        (SGLANG, Queue(162, 2826)),
        (LLAMA_CPP, Queue(4, 1)),
        (TGI, Queue(7, 2)),
        (VLLM.replace("\n", "\r\n"), Queue(12, 3)),
        ("vllm:num_requests_waiting 1.5e+01 1700000000000\n", Queue(0, 15)),
        ('vllm:num_requests_running{model="a"} 1\nvllm:num_requests_running{model="b"} 2\n'
         'vllm:num_requests_waiting{model="a"} 3\nvllm:num_requests_waiting{model="b"} 4\n', Queue(3, 7)),
        ('vllm:num_requests_waiting{model="{odd} name"} 4\n', Queue(0, 4)),
    ],
)  # fmt: skip
def test_what_engines_show(metrics: str, queue: Queue) -> None:
    assert queue_of(metrics) == queue


@pytest.mark.parametrize(
    "metrics",
    [
        "",
        "<html>Not found</html>",
        "# vllm:num_requests_waiting 3",
        "vllm:num_requests_waiting_by_reason 3",
        "vllm:num_requests_waiting NaN",
        "vllm:num_requests_waiting 1-2",
        "vllm:num_requests_waiting",
        "vllm:num_requests_running 3",
        "process_open_fds 12",
    ],
)
def test_what_says_nothing_of_a_queue(metrics: str) -> None:
    assert queue_of(metrics) is None


@given(st.lists(st.one_of(st.sampled_from([*VLLM.splitlines(), *TGI.splitlines()]), st.text(max_size=30))))
def test_any_text_is_read(lines: list[str]) -> None:
    queue = queue_of("\n".join(lines))
    assert queue is None or (queue.running >= 0 and queue.waiting >= 0)


@pytest.mark.parametrize(
    ("properties", "slots"),
    [
        ('{"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4, "build_info": "b8000"}', 4),
        ('{"total_slots": 0}', None),
        ('{"total_slots": "4"}', None),
        ("{}", None),
        ("[]", None),
        ("<html>", None),
        ("", None),
    ],
)
def test_slots_of_llama_cpp(properties: str, slots: int | None) -> None:
    assert slots_of(properties) == slots
