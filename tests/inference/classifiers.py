"""Small random models with a head for sequence classification, and what transformers makes of texts with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save_classifier(folder: Path, tokenizer_from: Path, model_type: str, labels: Sequence[str], **config: Any) -> Path:
    """Save a random classifier with the tokenizer of another model."""
    from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(len(labels))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 96,
        "pad_token_id": 0,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    make: Any = AutoModelForSequenceClassification.from_config
    model = make(CONFIG_MAPPING[model_type](**(sizes | config))).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(folder)
    return folder


@torch.inference_mode()
def own_logits(folder: Path, inputs: Sequence[str | tuple[str, str]]) -> np.ndarray[Any, Any]:
    """transformers' own logits, one input at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    rows = []
    for each in inputs:
        encoded = tokenizer(*((each,) if isinstance(each, str) else each), return_tensors="pt")
        if not has_types:
            encoded.pop("token_type_ids", None)
        rows.append(model(**encoded).logits[0])
    return torch.stack(rows).numpy()
