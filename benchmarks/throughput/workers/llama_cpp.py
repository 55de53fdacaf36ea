"""llama.cpp through the low-level interface of llama-cpp-python: one batch a step, of all sequences.

llama.cpp's library has no scheduler. This one does what its server does: every running sequence puts one token into the
batch, and prompts fill the rest of it as sequences become free.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.throughput.workers.protocol import Answer, Job, Options, Outcome, Ready, serve, timed

_BATCH_TOKENS = 2048
_KV_BYTES = 2
"""Bytes of an element of its KV cache, float16 by default."""
_PADDING = 256
"""It rounds the KV cache of a sequence up to a multiple of this."""


def load(options: Options) -> tuple[Ready, Answer]:
    llama: Any = importlib.import_module("llama_cpp")  # the environment that checks types has none
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(options["model"].encode(), llama.llama_model_default_params())
    if not model:
        raise ValueError(f"llama.cpp cannot load {options['model']}")
    kv_bytes = options["kv_gib"] * 2**30
    context: _Context | None = None

    def answer(job: Job) -> Outcome:
        # Its size is part of starting up: every sequence has a KV cache of the same length, of a job's longest.
        nonlocal context
        longest = max(len(prompt) + n for prompt, n in zip(job["prompts"], job["outputs"], strict=True))
        wanted = _Shape.fitting(llama, model, len(job["prompts"]), longest, options["max_num_seqs"], kv_bytes)
        if context is None or context.shape != wanted:
            if context is not None:
                context.close()
            context = _Context(llama, model, wanted)
        return timed(context.generate)(job)

    threads = len(os.sched_getaffinity(0))
    return {
        "version": f"(llama-cpp-python {llama.__version__})",
        "settings": f"{options['precision']} weights, float16 KV cache, one batch a step, {threads} threads",
    }, answer


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of a context: `sequences` at once, each of at most `length` tokens."""

    sequences: int
    length: int

    @classmethod
    def fitting(cls, llama: Any, model: Any, requests: int, longest: int, most: int, kv_bytes: int) -> _Shape:
        """As many sequences as there are requests, as allowed, or as fit in `kv_bytes`."""
        length = -(-longest // _PADDING) * _PADDING
        head_dim = llama.llama_model_n_embd(model) // llama.llama_model_n_head(model)
        a_token = 2 * _KV_BYTES * head_dim * llama.llama_model_n_head_kv(model) * llama.llama_model_n_layer(model)
        return cls(max(1, min(requests, most, kv_bytes // (length * a_token))), length)


class _Context:
    """A llama.cpp context and its batch. Holds nothing between two calls of `generate`."""

    def __init__(self, llama: Any, model: Any, shape: _Shape) -> None:
        self.shape = shape
        self._llama = llama
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        params = llama.llama_context_default_params()
        params.n_ctx = shape.sequences * shape.length
        params.n_seq_max = shape.sequences
        params.kv_unified = False  # a part for each sequence: in a common one each attends to all, and masks the rest
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.n_batch = _BATCH_TOKENS
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama.llama_init_from_model(model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context of {shape}")
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        self._llama.llama_batch_free(self._batch)
        self._llama.llama_free(self._context)

    def generate(self, job: Job) -> list[list[int]]:
        prompts, outputs = job["prompts"], job["outputs"]
        tokens: list[list[int]] = [[] for _ in prompts]
        waiting = deque(range(len(prompts)))
        # The n-th is llama.cpp's sequence n: it computes those without a gap in their numbers together.
        running: list[int] = []
        while waiting or running:
            self._batch.n_tokens = 0
            for sequence, request in enumerate(running):
                self._add([tokens[request][-1]], len(prompts[request]) + len(tokens[request]) - 1, sequence)
            while waiting and len(running) < self.shape.sequences:
                if self._batch.n_tokens + len(prompts[waiting[0]]) > _BATCH_TOKENS:
                    break
                self._add(prompts[waiting[0]], 0, len(running))
                running.append(waiting.popleft())
            for request, token in zip(running, self._compute(len(running)), strict=True):
                tokens[request].append(token)
            for sequence in reversed(range(len(running))):
                if len(tokens[running[sequence]]) == outputs[running[sequence]]:
                    self._end(running, sequence)
        return tokens

    def _end(self, running: list[int], sequence: int) -> None:
        """Free `sequence`, and move the last one to its place."""
        last = len(running) - 1
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        if sequence < last:
            self._llama.llama_memory_seq_cp(self._memory, last, sequence, -1, -1)
            self._llama.llama_memory_seq_rm(self._memory, last, -1, -1)
        running[sequence] = running[last]
        running.pop()

    def _add(self, tokens: list[int], position: int, sequence: int) -> None:
        """Put `tokens` of one sequence into the batch, to get the logits after the last."""
        batch = self._batch
        for offset, token in enumerate(tokens):
            row = batch.n_tokens
            batch.token[row] = token
            batch.pos[row] = position + offset
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = offset == len(tokens) - 1
            batch.n_tokens = row + 1

    def _compute(self, sequences: int) -> list[int]:
        """The likeliest next token of each sequence, in the order in which they were added."""
        if status := self._llama.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode ended with status {status}")
        logits = np.ctypeslib.as_array(self._llama.llama_get_logits(self._context), (sequences, self._vocab_size))
        likeliest: list[int] = logits.argmax(axis=1).tolist()
        return likeliest


if __name__ == "__main__":
    serve(load)
