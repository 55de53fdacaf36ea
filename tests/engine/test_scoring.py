"""Log-probabilities of prompts: those of transformers, whatever else a step holds, and never many rows at once."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import long_form

from batchwright import (
    AsyncEngine,
    ContextLengthExceeded,
    Engine,
    EngineClosed,
    InferenceRequest,
    InferenceResponse,
    InvalidRequest,
    NonFiniteLogits,
    SamplingParams,
    Score,
    StaticGenerator,
)
from batchwright.engine.attention import AttentionBackend
from batchwright.engine.scoring import RowScore, WantedRow, most_scored, score_rows
from batchwright.engine.step.batch import StepBatch

from .support import TINY, final, needs_decoder, nothing_left, only, run, tiny_model

PROMPT = SamplingParams(max_tokens=0, prompt_logprobs=3)
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=1)
VOCAB = TINY["vocab_size"]
# Thirty layers in float32, whose sums each processor takes in an order of its own.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def shared_engine(smollm2_path: Path) -> Iterator[Engine]:
    """The whole model, which knows capitals."""
    with Engine(smollm2_path, dtype="float32", kv_memory="100MB", max_model_len=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return tiny_model(folder, "llama", **TINY)


@pytest.fixture(scope="module")
def shared_tiny(folder: Path, model: Any) -> Iterator[Engine]:
    with Engine(folder, dtype="float32", kv_memory="8MB") as engine:
        yield engine


@pytest.fixture
def tiny(shared_tiny: Engine) -> Iterator[Engine]:
    yield shared_tiny
    assert nothing_left(shared_tiny)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Prompts of 1 to 120 tokens; a third begin as another one does."""
    drawn = random.Random(5)
    prompts = [
        [drawn.randrange(VOCAB) for _ in range(drawn.randint(1, 120))] for _ in range(long_form.examples(42, long=140))
    ]
    for _ in range(long_form.examples(18, long=60)):
        head = drawn.choice(prompts)
        prompts.append(head[: drawn.randint(1, len(head))] + [drawn.randrange(VOCAB) for _ in range(8)])
    return prompts


def own_logprobs(model: Any, prompt: list[int]) -> torch.Tensor:
    """The log-probabilities after each token, by transformers -> [tokens, vocab]."""
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    return logprobs


def assert_scored(model: Any, prompt: list[int], response: InferenceResponse, *, start: int = 0, top: int = 3) -> None:
    assert response.error is None
    scored = response.prompt_logprobs
    assert scored is not None
    assert len(scored) == len(prompt)
    own = own_logprobs(model, prompt)
    for place, entry in enumerate(scored):
        if place < max(1, start):
            assert entry is None
            continue
        assert entry is not None
        row = own[place - 1]
        assert entry.token_id == prompt[place]
        assert entry.rank is not None
        assert entry.logprob == pytest.approx(float(row[prompt[place]]), abs=TOLERANCE)
        # As many tokens are likelier as the rank says, but for those within the error.
        assert (row > row[prompt[place]] + TOLERANCE).sum() < entry.rank
        assert entry.rank <= (row > row[prompt[place]] - TOLERANCE).sum()
        assert [value for *_, value in entry.top] == pytest.approx(row.topk(top).values.tolist(), abs=TOLERANCE)
        for token, _, value in entry.top:
            assert value == pytest.approx(float(row[token]), abs=TOLERANCE)


def bits(response: InferenceResponse) -> list[tuple[float, int | None] | None]:
    assert response.prompt_logprobs is not None
    return [None if entry is None else (entry.logprob, entry.rank) for entry in response.prompt_logprobs]


def test_texts_have_the_log_probabilities_of_transformers(tiny: Engine, model: Any, texts: list[list[int]]) -> None:
    for _ in range(2):  # the second time, all of it could be found in the cache
        for prompt, response in zip(texts, tiny.generate(texts, PROMPT), strict=True):
            assert_scored(model, prompt, response)
            assert (response.finish_reason, response.token_ids, response.ttft_ms) == ("length", (), None)
            assert (response.usage.prompt_tokens, response.usage.cached_tokens) == (len(prompt), 0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_batch_tokens": 7, "max_num_seqs": 4}, id="chunks"),
        pytest.param({"max_batch_tokens": 16, "kv_memory": "200KB", "prefix_caching": False}, id="no cache"),
        pytest.param({"body": "transformers"}, id="transformers"),
    ],
)
def test_beside_generation_and_preempted_in_any_shape_of_steps(
    folder: Path, model: Any, texts: list[list[int]], options: dict[str, Any]
) -> None:
    some = texts[-40:]
    with Engine(folder, **({"dtype": "float32", "kv_memory": "8MB"} | options)) as engine:
        alone = [only(engine.generate([prompt], GREEDY)) for prompt in some[:10]]
        requests = []
        for number, prompt in enumerate(some):
            both: dict[str, Any] = {"prompt_logprobs": 3, "prompt_logprobs_start": number % 9}
            params = SamplingParams(max_tokens=number % 2, temperature=0, **both)
            requests.append(InferenceRequest.of(prompt, params, priority=9 - number))
            if number < 10:
                requests.append(InferenceRequest.of(prompt, GREEDY))
        done = []
        for request in requests:  # the more urgent ones come later, and take the places of others
            engine.submit(request)
            done += engine.step()
        responses = {response.request_id: response for response in done + run(engine)}
        assert engine.stats.preemptions or "max_batch_tokens" not in options
        assert nothing_left(engine)
    generated = [request for request in requests if request.prompt_logprobs is None]
    for request, before in zip(generated, alone, strict=True):
        assert responses[request.request_id].token_ids == before.token_ids
    for number, request in enumerate(each for each in requests if each.prompt_logprobs is not None):
        assert_scored(model, some[number], responses[request.request_id], start=number % 9)


def test_what_comes_before_the_start_is_taken_from_the_cache(tiny: Engine, model: Any) -> None:
    prompt = [each * 7 % VOCAB for each in range(100)]
    tiny.generate([prompt], PROMPT)
    for start, cached in ((0, 0), (17, 16), (16, 0), (97, 96), (100, 96), (500, 96)):
        response = only(
            tiny.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=3, prompt_logprobs_start=start))
        )
        assert response.usage.cached_tokens == cached
        assert_scored(model, prompt, response, start=min(start, 100))


def test_several_completions_score_their_prompt_once(tiny: Engine, model: Any, texts: list[list[int]]) -> None:
    for most in (0, 3):
        params = SamplingParams(max_tokens=most, n=3, seed=1, prompt_logprobs=3)
        responses = tiny.generate(texts[:6], params)
        for prompt, response in zip(texts, responses, strict=False):
            assert_scored(model, prompt, response)
            assert [len(choice.token_ids) for choice in response.choices] == [most] * 3


def test_streams_end_with_the_log_probabilities_of_the_prompt(tiny: Engine, model: Any) -> None:
    events = list(tiny.stream([[5, 6, 7]], PROMPT))
    assert [(event.text, event.token_ids, event.finish_reason) for event in events] == [("", (), "length")]
    assert_scored(model, [5, 6, 7], final(events))
    events = list(tiny.stream([[5, 6, 7]], SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=3)))
    assert [len(event.token_ids) for event in events] == [1, 1]
    assert_scored(model, [5, 6, 7], final(events))


def test_a_step_has_few_scored_rows(folder: Path, tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds the memory: rows of logits in one product with the head."""
    assert [most_scored(vocab, 8192) for vocab in (199, 49_152, 150_000, 10**8)] == [8192, 682, 223, 16]
    assert most_scored(199, 512) == 512
    rows: list[int] = []
    own = tiny.core.body.forward

    def forward(batch: StepBatch) -> torch.Tensor:
        rows.append(len(batch.logit_rows))
        return own(batch)

    monkeypatch.setattr(tiny.core.body, "forward", forward)
    monkeypatch.setattr(tiny.core.scheduler, "max_scored", 30)
    prompts = [[each * 3 % VOCAB for each in range(length)] for length in (200, 1, 31, 90, 30)]
    requests = [InferenceRequest.of(prompt, PROMPT) for prompt in prompts]
    tiny.generate([*requests, InferenceRequest.of([1, 2, 3], GREEDY)])
    assert max(rows) <= 30 + len(requests) + 1
    assert sum(rows) == sum(len(prompt) - 1 for prompt in prompts) + GREEDY.max_tokens


def test_logits_that_are_not_finite_fail_their_request_alone(
    tiny: Engine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tiny.core.body.forward
    bad = [9, 9, 9, 4, 1, 2]

    def forward(batch: StepBatch) -> torch.Tensor:
        logits = own(batch).clone()
        after_bad = batch.token_ids[batch.logit_rows] == 4
        logits[after_bad] = torch.where(torch.arange(VOCAB, device=logits.device) == 7, math.nan, logits[after_bad])
        return logits

    good = [9, 9, 9, 5, 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(tiny.core.body, "forward", forward)
        responses = tiny.generate([bad, good, bad], [PROMPT, PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0)])
    for response in (responses[0], responses[2]):
        assert isinstance(response.error, NonFiniteLogits)
        assert response.prompt_logprobs is None
    assert_scored(model, good, responses[1])
    # Nothing of it is left in the cache.
    assert_scored(model, bad, only(tiny.generate([bad], PROMPT)))


def test_a_failed_step_is_computed_again(tiny: Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own, failures = tiny.core.body.forward, iter([True, False, True])

    def forward(batch: StepBatch) -> torch.Tensor:
        logits = own(batch)
        if next(failures, False):
            raise torch.OutOfMemoryError("out of memory")
        return logits

    monkeypatch.setattr(tiny.core.body, "forward", forward)
    prompts = [[each * 5 % VOCAB for each in range(60)], [3, 1, 4, 1, 5]]
    for prompt, response in zip(prompts, tiny.generate(prompts, PROMPT), strict=True):
        assert_scored(model, prompt, response)


def test_an_interrupt_loses_nothing(tiny: Engine, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = InferenceRequest.of([3, 1, 4, 1, 5], PROMPT)
    tiny.submit(request)
    with monkeypatch.context() as patch:
        patch.setattr(tiny.core._delivery, "_settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            tiny.step()
    (response,) = tiny.step()
    assert_scored(model, [3, 1, 4, 1, 5], response)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_reduced_as_if_each_were_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 50_000, generator=generator).to(dtype)
    logits[7] = 1.0  # of equal logits the first one is the likeliest
    rows = [*range(0, 300, 3), *range(100, 160), 7]
    wanted = [WantedRow(row * 11 % 50_000, row % 4) for row in rows[:-1]] + [WantedRow(2, 0)]
    together = score_rows(logits, rows, wanted)
    for row, each, score in zip(rows, wanted, together, strict=True):
        assert score == score_rows(logits, [row], [each])[0]
        own = logits[row].float().log_softmax(-1)
        top = own.topk(each.count)
        assert score.logprob == float(own[each.token])
        assert (score.top, score.top_ids) == (top.values.tolist(), top.indices.tolist())
        assert score.rank == 1 + int((logits[row] > logits[row, each.token]).sum()) + (
            int((logits[row, : each.token] == logits[row, each.token]).sum())
        )
    assert together[-1] == RowScore(together[-1].logprob, 3, [], [])
    assert together[-1].logprob == pytest.approx(-math.log(50_000))
    assert score_rows(logits, [], []) == []
    for bad in (torch.nan, torch.inf):
        logits[0, 5] = bad
        assert math.isnan(score_rows(logits, [0], [WantedRow(3, 1)])[0].logprob)
    logits[1, 5] = -torch.inf
    assert score_rows(logits, [1], [WantedRow(5, 0)])[0] == RowScore(-math.inf, 50_000, [], [])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "float32"}, id="float32"),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16", marks=needs_decoder),
        pytest.param({"dtype": "bfloat16", "quantization": "int8"}, id="int8", marks=needs_decoder),
    ],
)
def test_deterministic_scores_are_the_same_bits_in_any_company(
    tmp_path: Path, texts: list[list[int]], options: dict[str, Any], native: AttentionBackend | str
) -> None:
    if isinstance(native, str):
        pytest.skip(native)
    tiny_model(tmp_path, "llama", **TINY | {"head_dim": 32})
    some = texts[-12:]
    with Engine(tmp_path, device="cpu", deterministic=True, kv_memory="8MB", **options) as engine:
        alone = [bits(only(engine.generate([prompt], PROMPT))) for prompt in some]
    small = {"max_batch_tokens": 16, "max_num_seqs": 5, "kv_memory": "400KB"}
    with Engine(tmp_path, device="cpu", deterministic=True, **options | small) as engine:
        mixed = engine.generate([*some, *texts[:5]], [PROMPT] * len(some) + [GREEDY] * 5)
    assert [bits(response) for response in mixed[: len(some)]] == alone


def test_static_batches_refuse_what_they_do_not_compute(folder: Path, model: Any) -> None:
    (answer,) = StaticGenerator(folder).generate_batch([[1, 2, 3]], [PROMPT])
    assert isinstance(answer, InvalidRequest)
    assert answer.param == "prompt_logprobs"


# Continuations


def test_continuations_of_contexts_share_what_they_have_in_common(
    tiny: Engine, model: Any, texts: list[list[int]]
) -> None:
    contexts = [[*range(1, 65), number] for number in range(4)]
    pairs = [(context, [number * 3 % VOCAB, 5][: 1 + number % 2]) for context in contexts for number in range(6)]
    random.Random(1).shuffle(pairs)
    before = tiny.stats.copy()
    scores = tiny.score(*map(list, zip(*pairs, strict=True)))
    # 64 tokens are common to all, and one more to those of a context; those of one token differ in no key or value.
    assert tiny.stats.prefill_tokens - before.prefill_tokens == 64 + 4 * (1 + 3 * 2)
    for (context, continuation), score in zip(pairs, scores, strict=True):
        rows = own_logprobs(model, context + continuation)[len(context) - 1 : -1]
        assert score.error is None
        assert score.logprob == pytest.approx(
            sum(float(r[t]) for r, t in zip(rows, continuation, strict=True)), abs=1e-4
        )
        assert score.is_greedy == (rows.argmax(-1).tolist() == continuation)
        assert [each.token_id for each in score.tokens] == continuation


def test_greedy_continuations_are_known_as_such(tiny: Engine, texts: list[list[int]]) -> None:
    some = texts[:12]
    answers = [list(response.token_ids) for response in tiny.generate(some, GREEDY)]
    assert all(score.is_greedy for score in tiny.score(some, answers))
    wrong = [[*answer[:-1], (answer[-1] + 1) % VOCAB] for answer in answers]
    assert not any(score.is_greedy for score in tiny.score(some, wrong))


def test_one_context_serves_all_and_what_is_wrong_fails_alone(tiny: Engine) -> None:
    good, empty, unknown, long = tiny.score([1, 2, 3], [[4], [], [VOCAB], [5] * 400])
    assert good.error is None
    assert isinstance(empty.error, InvalidRequest)
    assert isinstance(unknown.error, InvalidRequest)
    assert isinstance(long.error, ContextLengthExceeded)
    assert math.isnan(empty.logprob)
    assert tiny.score([], []) == []
    with pytest.raises(ValueError, match="contexts: 2 for 1 continuations"):
        tiny.score([[1], [2]], [[3]])
    (no_tokenizer,) = tiny.score("a", ["b"])
    assert isinstance(no_tokenizer.error, InvalidRequest)


def test_from_coroutines(folder: Path, tiny: Engine, texts: list[list[int]]) -> None:
    some, endings = [*texts[:6], [1]], [*([number, 5] for number in range(6)), [VOCAB]]
    expected = tiny.score(some, endings)

    async def work() -> list[list[Score]]:
        async with AsyncEngine(Engine(folder, dtype="float32", kv_memory="8MB")) as engine:
            found = await asyncio.gather(engine.score(some, endings), engine.score(some[0], endings[:1]))
            assert await engine.score([], []) == []
            with pytest.raises(ValueError, match="contexts: 2 for 1 continuations"):
                await engine.score([[1], [2]], [[3]])
            given_up = asyncio.ensure_future(engine.score(texts, [[1]] * len(texts)))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.wait([given_up])
            answer = await engine.generate([1, 2], SamplingParams(max_tokens=1))  # which comes after the cancellation
            assert answer.error is None
        with pytest.raises(EngineClosed):
            await engine.score([[1], [2]], [[3], [4]])
        return [*found]

    scores, [alone] = asyncio.run(work())
    for score, other in zip([*scores, alone], [*expected, expected[0]], strict=True):
        assert type(score.error) is type(other.error)
        if score.error is None:
            assert score.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert (score.is_greedy, len(score.tokens)) == (other.is_greedy, 2)


@pytest.mark.needs_model
def test_texts_of_the_real_model(smollm2_path: Path, engine: Engine) -> None:
    from transformers import AutoModelForCausalLM

    passages = (Path(__file__).parent / "data" / "passages.txt").read_text(encoding="utf-8").split("\n\n")
    texts = [" ".join(passage.split()[: 8 + 2 * number]) for number, passage in enumerate(passages[:12])]
    reference = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    encode = engine.core.tokenizer.encode
    for text, response in zip(texts, engine.generate(texts, PROMPT), strict=True):
        assert_scored(reference, encode(text), response)
    pairs = [("The capital of France is", " Paris"), ("The capital of France is ", "Rome"), ("", "Once upon a time")]
    scores = engine.score(*map(list, zip(*pairs, strict=True)))
    assert [[each.token for each in score.tokens] for score in scores] == [
        [" Paris"], [" Rome"], ["Once", " upon", " a", " time"],
    ]  # fmt: skip
    start = engine.core.tokenizer.first_token_id
    assert start is not None
    for score, context in zip(scores, (encode(pairs[0][0]), encode(pairs[0][0]), [start]), strict=True):
        tokens = [each.token_id for each in score.tokens]
        rows = own_logprobs(reference, context + tokens)[len(context) - 1 : -1]
        assert score.logprob == pytest.approx(sum(float(r[t]) for r, t in zip(rows, tokens, strict=True)), abs=1e-3)
    assert scores[0].is_greedy
    assert not scores[1].is_greedy
    assert isinstance(scores[0], Score)
    json.dumps([score.logprob for score in scores])
    # A control character of which this tokenizer makes no token.
    empty, fair = engine.score("", ["\x04", "Once"])
    assert isinstance(empty.error, InvalidRequest)
    assert fair.error is None
