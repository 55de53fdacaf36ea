"""transformers `generate` over padded static batches."""

from __future__ import annotations

from typing import Any

from benchmarks.throughput.workers.protocol import Answer, Job, Options, Ready, serve, timed

_PAD = 0
_MIXED_BATCH = 32
"""Larger batches of mixed lengths lose more to padding than they gain."""


def load(options: Options) -> tuple[Ready, Answer]:
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id = None  # nothing ends a sequence early
    model.generation_config.pad_token_id = _PAD
    most = options["max_num_seqs"]

    def batch(prompts: list[list[int]], steps: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[_PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=steps)
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows

    @torch.inference_mode()
    def generate(job: Job) -> list[list[int]]:
        prompts, outputs = job["prompts"], job["outputs"]
        tokens: list[list[int]] = [[] for _ in prompts]
        for members in group_by_length(prompts, outputs, most):
            rows = batch([prompts[i] for i in members], max(outputs[i] for i in members))
            for i, row in zip(members, rows, strict=True):
                tokens[i] = row[: outputs[i]]
        return tokens

    settings = f"padded static batches by length, {model.config._attn_implementation}, bfloat16"  # noqa: SLF001
    return {"version": transformers.__version__, "settings": settings}, timed(generate)


def group_by_length(prompts: list[list[int]], outputs: list[int], most: int) -> list[list[int]]:
    """Indices in batches of similar lengths, as a careful user does to lose little to padding."""
    if len({(len(prompt), n) for prompt, n in zip(prompts, outputs, strict=True)}) > 1:
        most = min(most, _MIXED_BATCH)
    order = sorted(range(len(prompts)), key=lambda i: (outputs[i], len(prompts[i])))
    return [order[start : start + most] for start in range(0, len(order), most)]


if __name__ == "__main__":
    serve(load)
