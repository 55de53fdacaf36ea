"""The script that a user of transformers writes: `python -m benchmarks.starting.transformers_batch MODEL INPUT OUTPUT`.

All lines are one padded batch. They are written as lines of OpenAI's batch output, as far as the benchmark reads them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, source: str, target: str) -> None:
    """Answer the lines of `source` into `target`."""
    lines = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    bodies = [line["body"] for line in lines]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # as `ignore_eos` in the lines asks
    model.generation_config.pad_token_id = tokenizer.pad_token_id or 0
    inputs = tokenizer.apply_chat_template(
        [body["messages"] for body in bodies],
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
    )
    outputs = model.generate(**inputs, do_sample=False, max_new_tokens=max(body["max_tokens"] for body in bodies))
    with Path(target).open("w", encoding="utf-8") as file:
        for line, row in zip(lines, outputs[:, inputs["input_ids"].shape[1] :], strict=True):
            tokens = row[: line["body"]["max_tokens"]]
            message = {"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)}
            body = {"choices": [{"message": message}], "usage": {"completion_tokens": len(tokens)}}
            file.write(json.dumps({"custom_id": line["custom_id"], "response": {"body": body}}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
