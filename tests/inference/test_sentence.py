"""What a sentence-transformers folder asks for: pooling, normalization, the longest text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchwright import Encoder, UnsupportedModel
from batchwright.encoder.sentence import SentenceSettings, pool, read_settings


def write(folder: Path, kinds: list[str], pooling: dict[str, Any]) -> None:
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": f"{at}_{kind}"} for at, kind in enumerate(kinds)
    ]
    modules[0]["path"] = ""
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 40, "do_lower_case": True}))


def test_without_modules_it_is_the_mean(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == SentenceSettings()


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, ("cls", "max")),
        ({"pooling_mode": "lasttoken"}, ("lasttoken",)),
        ({"pooling_mode": ["cls", "mean"]}, ("cls", "mean")),
        ({}, ("mean",)),
    ],
)
def test_old_and_new_ways_to_write_the_pooling(
    tmp_path: Path, config: dict[str, Any], pooling: tuple[str, ...]
) -> None:
    write(tmp_path, ["Transformer", "Pooling"], config)
    assert read_settings(tmp_path) == SentenceSettings(pooling, normalize=False, max_length=40, lower_case=True)
    write(tmp_path, ["Transformer", "Pooling", "Normalize"], config)
    assert read_settings(tmp_path).normalize


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ["Transformer", "Pooling", "Dense"], {})
    with pytest.raises(UnsupportedModel, match="Dense"):
        read_settings(tmp_path)
    write(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "weightedmean"})
    with pytest.raises(UnsupportedModel, match="weightedmean"):
        read_settings(tmp_path)


def test_pooling_leaves_out_what_lies_between() -> None:
    hidden = torch.arange(12.0).view(6, 2)  # sequences in cells 0..2 and 4..5, padding in 3
    starts, lengths = torch.tensor([0, 4]), torch.tensor([3, 2])
    pooled = pool(hidden, starts, lengths, ("mean", "max", "cls", "lasttoken"))
    assert pooled.tolist() == [[2, 3, 4, 5, 0, 1, 4, 5], [9, 10, 10, 11, 8, 9, 10, 11]]


def test_the_settings_of_the_folder_are_obeyed(tiny_encoder: Callable[..., Path]) -> None:
    folder = tiny_encoder("bert")
    write(folder, ["Transformer", "Pooling", "Normalize"], {"pooling_mode": ["cls", "mean"]})
    encoder = Encoder(folder)
    assert (encoder.dim, encoder.max_length) == (128, 40)
    vectors = encoder.encode(["the sky", "THE SKY"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(vectors[0], vectors[1])
    long = Encoder(folder, normalize=False).encode(["the sky"])
    assert np.abs(long / np.linalg.norm(long) - vectors[0]).max() < 1e-6
    assert np.linalg.norm(long) > 2
