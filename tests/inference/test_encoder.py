"""Embeddings: the same in every layout and as transformers computes them, each text by itself where it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from batchwright import Batcher, ContextLengthExceeded, Encoder, InvalidRequest, UnsupportedModel

from .conftest import own_means

LONG = " ".join(["sky"] * 300)
SHORT = ["the sky is blue", "sky", "", "a b c d e f g", "the sky is wide"]


@pytest.mark.parametrize("layout", ["packed", "padded", "bucketed"])
def test_every_layout_gives_what_transformers_gives(
    minilm_path: Path, texts: list[str], expected: np.ndarray[Any, Any], layout: Any
) -> None:
    encoder = Encoder(minilm_path, layout=layout)
    assert np.abs(encoder.encode(texts) - expected).max() < 1e-5
    outputs: list[Any] = encoder.generate_batch(list(texts))
    assert all(output.dtype == np.float32 and output.shape == (384,) for output in outputs)
    assert np.abs(np.stack(outputs) - expected).max() < 1e-5
    assert encoder.stats.cells >= encoder.stats.tokens
    assert (encoder.stats.cells == encoder.stats.tokens) == (layout == "packed")


def test_without_compiled_kernels_it_is_the_same(
    minilm_path: Path, texts: list[str], expected: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchwright.encoder.packed_attention.load_bidirectional", lambda _: "no compiler")
    for layout in ("packed", "padded"):
        encoder = Encoder(minilm_path, layout=layout)
        assert "torch attention" in encoder.description
        assert np.abs(encoder.encode(texts) - expected).max() < 1e-5


def test_bfloat16_points_the_same_way(minilm_path: Path, texts: list[str], expected: np.ndarray[Any, Any]) -> None:
    vectors = Encoder(minilm_path, dtype="bfloat16").encode(texts)
    assert vectors.dtype == np.float32
    assert (vectors * expected).sum(1).min() > 0.999


def test_many_texts_in_several_lanes_keep_their_order(encoder: Encoder) -> None:
    threads = torch.get_num_threads()
    texts = [f"number {n} " * (1 + n % 23) for n in range(120)]
    together = encoder.encode(texts)
    for at in (0, 1, 57, 119):
        assert np.abs(encoder.encode([texts[at]]) - together[at]).max() < 1e-6
    assert torch.get_num_threads() == threads
    seen: list[int] = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [threads]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same(minilm_path: Path, texts: list[str], expected: np.ndarray[Any, Any]) -> None:
    for layout in ("packed", "padded", "bucketed"):
        assert np.abs(Encoder(minilm_path, device="cuda", layout=layout).encode(texts) - expected).max() < 1e-4


def test_no_texts(encoder: Encoder) -> None:
    assert encoder.encode([]).shape == (0, 384)
    assert encoder.generate_batch([]) == []


def test_what_cannot_be_computed_fails_alone(encoder: Encoder) -> None:
    prompts = ["sky", 3, [101, 3712, 102], LONG, [], [10**6], None, [True], [{"role": "user", "content": "sky"}], "sky"]
    outputs: list[Any] = encoder.generate_batch(prompts)
    kinds = [type(output) for output in outputs]
    refused = [InvalidRequest] * 5
    assert kinds == [np.ndarray, InvalidRequest, np.ndarray, ContextLengthExceeded, *refused, np.ndarray]
    assert np.array_equal(outputs[0], outputs[9])
    assert np.abs(outputs[0] - outputs[2]).max() < 1e-6, "token ids are used as they are"
    assert "302 tokens is longer than max_length=256" in str(outputs[3])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("\ud800 x", "lone surrogate, '.ud800', at character 0"),
        (b"x", "prompt of type bytes"),
        ([2**70], "outside 0 to 30521"),
        ([101, -1], "outside 0 to 30521"),
    ],
)
def test_what_no_tokenizer_takes_fails_alone(encoder: Encoder, prompt: Any, words: str) -> None:
    outputs: list[Any] = encoder.generate_batch(["sky", prompt, "sky"])
    assert [type(output) for output in outputs] == [np.ndarray, InvalidRequest, np.ndarray]
    assert outputs[1].param == "prompt"
    with pytest.raises(InvalidRequest, match=words):
        raise outputs[1]
    with pytest.raises(InvalidRequest, match=rf"texts\[1\]: prompt .*{words.removeprefix('prompt ')}"):
        encoder.encode(["sky", prompt])


def test_loading_shows_no_progress_bars(minilm_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    shown: Any = logging
    before = shown.is_progress_bar_enabled(), are_progress_bars_disabled()
    shown.enable_progress_bar()
    try:
        Encoder(minilm_path)
        assert "Loading weights" not in capfd.readouterr().err
        assert shown.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
    finally:
        if not before[0]:
            shown.disable_progress_bar()
        if before[1]:
            disable_progress_bars()


def test_encode_names_the_text_that_it_refuses(encoder: Encoder) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"texts\[1\]: prompt of 302 tokens"):
        encoder.encode(["sky", LONG])
    with pytest.raises(ValueError, match="give a list"):
        encoder.encode("sky")


def test_truncation_is_asked_for_and_counted(minilm_path: Path) -> None:
    encoder = Encoder(minilm_path, truncate=True, max_length=16)
    kept = AutoTokenizer.from_pretrained(minilm_path)(LONG, truncation=True, max_length=16)["input_ids"]
    assert encoder.tokenizer.encode(LONG) == kept
    vectors = encoder.encode([LONG, "sky", " ".join(["sky"] * 14)])
    assert np.abs(vectors[0] - vectors[2]).max() < 1e-6
    assert encoder.stats.truncated == 1
    assert isinstance(encoder.generate_batch([[101] * 17])[0], ContextLengthExceeded), "ids are used as they are"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "flat"}, "layout='flat'"),
        ({"max_length": 0}, "max_length=0"),
        ({"max_length": 513}, "max_length=513: this model has 512"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_a_wrong_setting_is_refused(minilm_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Encoder(minilm_path, **options)


def test_a_batcher_measures_it_in_tokens(encoder: Encoder) -> None:
    async def ask() -> tuple[list[Any], Any]:
        async with Batcher(encoder) as batcher:
            answers = await asyncio.gather(*(batcher.compute(text) for text in SHORT))
            response = await batcher.add_request("sky")
            failed = await batcher.add_request(LONG)
            return answers, (response, failed)

    answers, (response, failed) = asyncio.run(ask())
    assert np.abs(np.stack(answers) - encoder.encode(SHORT)).max() < 1e-5
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (3, 0)
    assert isinstance(failed.error, ContextLengthExceeded)


@pytest.mark.parametrize(
    ("model_type", "config", "body"),
    [
        ("bert", {}, "fused"),
        ("bert", {"hidden_act": "gelu_new"}, "fused"),
        ("bert", {"hidden_act": "relu"}, "transformers"),
        ("roberta", {"type_vocab_size": 1}, "fused"),
        ("electra", {"embedding_size": 32}, "transformers"),
        ("distilbert", {"dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 2}, "transformers"),
    ],
)
def test_other_architectures_that_can_be_packed(
    tiny_encoder: Callable[..., Path], model_type: str, config: dict[str, Any], body: str
) -> None:
    folder = tiny_encoder(model_type, **config)
    own = own_means(folder, SHORT)
    for layout in ("packed", "padded", "bucketed"):
        encoder = Encoder(folder, layout=layout)
        assert encoder.description.startswith(body)
        assert np.abs(encoder.encode(SHORT) - own).max() < 1e-5 * np.abs(own).max() + 1e-5


def test_an_architecture_that_cannot_be_packed_says_so(tiny_encoder: Callable[..., Path]) -> None:
    folder = tiny_encoder("mpnet")  # it reads the distance of two tokens off their places in the row
    with pytest.raises(UnsupportedModel, match="use layout='bucketed' or layout='padded'"):
        Encoder(folder)
    own = own_means(folder, SHORT)
    assert np.abs(Encoder(folder, layout="bucketed").encode(SHORT) - own).max() < 1e-4


def test_a_causal_model_is_not_packed_as_if_it_were_none(smollm2_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="cannot compute sequences packed"):
        Encoder(smollm2_path)


def test_weights_that_are_not_there_are_not_made_up(tiny_encoder: Callable[..., Path]) -> None:
    folder = tiny_encoder("electra", embedding_size=32)
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"no weights for encoder\.layer\.1\.output\.dense\.weight"):
        Encoder(folder)
