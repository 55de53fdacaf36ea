"""The real encoder, what transformers makes of the same texts, and small models of other architectures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchwright import Encoder
from batchwright.models import resolve

# The benchmarks are not installed: they are imported from the checkout.
sys.path.append(str(Path(__file__).resolve().parents[2]))


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The folder of the default encoder, in the user's own cache: fetched by the first run, found by later ones."""
    return resolve("minilm", progress=print)


@pytest.fixture(scope="session")
def encoder(minilm_path: Path) -> Encoder:
    """The real one, with two lanes."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    encoder = Encoder(minilm_path)
    torch.set_num_threads(before)
    return encoder


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """None, one token, usual ones of several lengths, some alike, and one of exactly the 256 tokens of the model."""
    usual = [" ".join(["the sky is blue and wide"] * n) + "." for n in (1, 2, 3, 5, 8, 8, 8, 13, 30)]
    return ["", "sky", *usual, " ".join(["sky"] * 254), "Grün, 天空, 🌈!"]


@pytest.fixture(scope="session")
def expected(minilm_path: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    """Normalized means of transformers' own hidden states, one text at a time."""
    return own_means(minilm_path, texts, normalize=True)


@pytest.fixture
def tiny_encoder(tmp_path: Path, minilm_path: Path) -> Callable[..., Path]:
    """Saves a random encoder of an architecture, with the tokenizer of the real one."""

    def make(model_type: str, **config: Any) -> Path:
        from transformers import CONFIG_MAPPING, AutoModel, AutoTokenizer

        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(minilm_path)
        sizes = {
            "vocab_size": tokenizer.vocab_size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 80,
            "pad_token_id": 0,
        }
        make_model: Any = AutoModel.from_config
        model = make_model(CONFIG_MAPPING[model_type](**(sizes | config))).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        folder = tmp_path / model_type
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@torch.inference_mode()
def own_means(folder: Path, texts: list[str], *, normalize: bool = False) -> np.ndarray[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        rows.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0))
    means = torch.stack(rows)
    return (torch.nn.functional.normalize(means) if normalize else means).numpy()
