"""What several test modules need: greedy references, and tiny models saved to a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from batchwright import Engine, InferenceRequest, InferenceResponse, SamplingParams, StreamEvent
from batchwright.engine.native import NativeKernels, load_kernels

_FOUND = load_kernels(torch.bfloat16)
COMPILED = isinstance(_FOUND, NativeKernels) and _FOUND.has_decoder and not torch.cpu._is_amx_tile_supported()
"""Whether whole layers are compiled for this processor."""
needs_decoder = pytest.mark.skipif(not COMPILED, reason="no compiled layers for this processor")

NEW_TOKENS = 20
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
STORY = "Once upon a time there was a small fox who"
LIST = "The days of the week are Monday, Tuesday,"

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A config that most decoder-only architectures take."""


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Have so many threads compute in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def slices(ids: list[int], lengths: list[int]) -> list[list[int]]:
    """A slice of `ids`, read round and round, for each length; each begins where the one before ended."""
    found, at = [], 0
    for length in lengths:
        found.append([ids[(at + i) % len(ids)] for i in range(length)])
        at += length
    return found


def own_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """What `generate` of transformers adds to `prompt`, up to `new_tokens` tokens, end-of-text ignored."""
    ids = torch.tensor([prompt], device=model.device)
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def confirmed_greedy(model: Any, prompt: list[int], likely: list[int]) -> list[int]:
    """What `own_greedy` adds to `prompt`, in one pass over the model when that is `likely`, as long as this."""
    ids = torch.tensor([[*prompt, *likely[:-1]]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(likely)).logits[0]
    chosen: list[int] = logits.argmax(-1).tolist()
    right = next((place for place, pair in enumerate(zip(chosen, likely, strict=True)) if pair[0] != pair[1]), None)
    if right is None:
        return chosen
    # From the first difference on, what was computed follows from a wrong token.
    begun = chosen[: right + 1]
    rest = len(likely) - len(begun)
    return begun + (own_greedy(model, prompt + begun, rest) if rest else [])


def tiny_model(folder: Path, model_type: str, **config: Any) -> Any:
    """A random model of the architecture, saved to `folder`, with weights large enough that outputs vary."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config
    model = make(CONFIG_MAPPING[model_type](**config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        else:  # biases and norms: near what they were, yet not zero or one
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def engines_over(model: Path) -> Iterator[Callable[..., Engine]]:
    """Yield a function that makes engines over `model`, in float32 by default, and close them all afterwards."""
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engine = Engine(model, **({"dtype": "float32", "kv_memory": "400MB"} | options))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def nothing_left(engine: Engine) -> bool:
    core = engine.core
    return not (
        core.unfinished
        or core.unfinished_sequences
        or core.scheduler.has_work
        or core.scheduler.blocks.num_used
        or engine._unclaimed
        or engine._inboxes
        or core._delivery._callbacks
        or core._delivery.events
    )


def only(responses: list[InferenceResponse]) -> InferenceResponse:
    (response,) = responses
    return response


def run(engine: Engine) -> list[InferenceResponse]:
    """Step until nothing is left; the responses in the order in which they came."""
    done = []
    while engine.unfinished:
        done.extend(engine.step())
    return done


def joined(events: list[StreamEvent], index: int = 0) -> str:
    return "".join(event.text for event in events if event.index == index)


def final(events: list[StreamEvent]) -> InferenceResponse:
    assert [event.response is not None for event in events] == [False] * (len(events) - 1) + [True]
    response = events[-1].response
    assert response is not None
    return response


def finished(
    engine: Engine,
    found: dict[str, InferenceResponse] | None = None,
    step: Callable[[], list[InferenceResponse]] | None = None,
) -> dict[str, InferenceResponse]:
    """The responses of all requests by their ids, with those `found` before. `step`: what steps the engine."""
    found = {} if found is None else found
    while engine.unfinished:
        found.update({response.request_id: response for response in (step or engine.step)()})
    assert nothing_left(engine)
    return found


def completions(wanted: list[InferenceRequest], found: dict[str, InferenceResponse]) -> list[Any]:
    """Tokens, text and reason of each completion of each of `wanted`."""
    return [
        [(choice.token_ids, choice.text, choice.finish_reason) for choice in found[request.request_id].choices]
        for request in wanted
    ]
