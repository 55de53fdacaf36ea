"""`ParallelBody`: a model shared by several processes of this machine, as seen from rank 0, which is this process."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from batchwright.cgroups import threads_for
from batchwright.cpu_cores import core_groups, cores_of, logical_processors
from batchwright.engine.attention import KVShape
from batchwright.engine.bodies.body import ModelBody, free_bytes
from batchwright.engine.bodies.load import choose_device, choose_dtype, load_shard
from batchwright.engine.bodies.shard import RankUnreachable, Shard
from batchwright.engine.step.batch import StepBatch
from batchwright.engine.tensor_parallel.group import join_group, require_no_group
from batchwright.engine.tensor_parallel.messages import Allocate, Load, Step
from batchwright.engine.tensor_parallel.rank_process import RankProcess
from batchwright.engine_config import EngineConfig
from batchwright.errors import EngineClosed, InputError

_GRACE = 5.0
"""Seconds to wait for the reason why a rank ended, once the connection to it is broken."""


class ParallelBody(ModelBody):
    """The model in `folder` on `config.tensor_parallel` ranks, each on a GPU or a group of this process's cores.

    The other ranks are processes that end with this one. When one of them ends, or a step fails, `failure` says why and
    the body computes nothing any more: the ranks may be at different points of the step. Raises the errors of
    `load_body`, and `EngineClosed` if another rank cannot load its part.
    """

    name = "fused"

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__()
        ranks = config.tensor_parallel
        require_no_group(ranks)
        places = _places(config)
        self._is_closed = self._is_joined = False
        self._failure: str | None = None
        self._cause_found = threading.Event()
        self._others: list[RankProcess] = []
        self._threads = torch.get_num_threads()
        self._folder = tempfile.TemporaryDirectory(prefix="batchwright-ranks-")
        try:
            # They import torch and read their parts while this process reads its own.
            for rank, (device, cpus, threads) in enumerate(places[1:], start=1):
                order = Load(folder, _config_on(config, device), rank, ranks, cpus)
                self._others.append(RankProcess(order, threads, self._look))
            device, _, threads = places[0]
            if threads is not None:
                torch.set_num_threads(threads)
            self._own = load_shard(folder, _config_on(config, device), Shard(0, ranks))
            self._loaded = [each.loaded() for each in self._others]
        except BaseException:
            self.close()
            raise
        self.dtype, self.device = self._own.dtype, self._own.device
        self.vocab_size, self.max_model_len = self._own.vocab_size, self._own.max_model_len

    @property
    def returns_early(self) -> bool:
        return False  # the ranks wait for each other

    @property
    def description(self) -> str:
        return f"{self._own.description}, tensor parallel on {len(self._others) + 1} processes"

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [each.pid for each in self._others]

    @property
    def failure(self) -> str | None:
        if self._failure is None:
            lost = [each for each in self._others if each.lost is not None]
            cause = next((each for each in lost if each.is_cause), None)
            return cause.lost if cause is not None else lost[0].lost if lost else None
        return self._failure

    def free_memory(self) -> int:
        if self.device.type == "cuda":
            return min([free_bytes(self.device), *(each.free_memory for each in self._loaded)])
        return free_bytes(self.device) // (len(self._others) + 1)

    def kv_shapes(self, num_blocks: int, block_size: int, attention: str) -> list[KVShape]:
        """Return the shapes for the rank that has the most heads."""
        most = self._own.most_kv_heads
        return [replace(each, kv_heads=most) for each in self._own.kv_shapes(num_blocks, block_size, attention)]

    def allocate(self, num_blocks: int, block_size: int, attention: str) -> None:
        meeting = Path(self._folder.name) / "meeting"
        for each in self._others:
            each.send(Allocate(num_blocks, block_size, attention, meeting))
        self._own.allocate(num_blocks, block_size, attention)
        for each in self._others:
            each.allocated()  # or the reason for its failure, which the other ranks' wait for it would not show
        join_group(meeting, 0, len(self._others) + 1, self.device)
        self._is_joined = True
        for each in self._others:
            each.joined()
        if self.device.type == "cpu":  # gloo has connected all ranks; NCCL may read the file again
            self._folder.cleanup()
        self.attention, self.caches = self._own.attention, self._own.caches

    def forward(self, batch: StepBatch) -> Tensor:
        if (reason := self.failure) is not None:
            raise EngineClosed(reason)
        try:
            step = _step_of(batch)
            for each in self._others:
                each.send(step)
            logits = self._own.forward(batch)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a failed sum is known after this
        except BaseException as error:
            self._failure = self._reason(error)
            self.close()  # the others wait for this rank in the middle of a step
            if isinstance(error, Exception):
                raise EngineClosed(self._failure) from error
            raise
        return logits

    def rows_for(self, tokens: int) -> int:
        return self._own.rows_for(tokens)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._failure = self.failure or "the ranks were ended"
        for each in self._others:
            each.close()
        if self._is_joined:
            with suppress(RuntimeError):  # it may be broken already
                dist.destroy_process_group()
        torch.set_num_threads(self._threads)
        self._folder.cleanup()

    def _look(self) -> None:
        """Record that a rank has ended."""
        if any(each.is_cause for each in self._others):
            self._cause_found.set()

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, RankUnreachable):
            self._cause_found.wait(_GRACE)  # failures of ranks that lost the same one may be noticed first
        if (lost := self.failure) is not None:
            return lost
        if isinstance(error, RankUnreachable):
            return f"rank 0 of {len(self._others) + 1} cannot reach the others: {error}"
        return f"rank 0 of {len(self._others) + 1} failed: {type(error).__name__}: {error}"


def _places(config: EngineConfig) -> list[tuple[str, tuple[int, ...], int | None]]:
    """Return the device, the logical processors (empty: any) and the number of threads (None: any) of each rank.

    Raises ValueError for more ranks than there are devices.
    """
    ranks = config.tensor_parallel
    if choose_device(config.device).type == "cuda":
        if ranks > (there := torch.cuda.device_count()):
            raise ValueError(
                f"tensor_parallel={ranks}: each process needs a GPU of its own, and {there} can be used here; give "
                f"{there} or less, or device='cpu'"
            )
        return [(f"cuda:{rank}", (), None) for rank in range(ranks)]
    try:
        groups = core_groups(cores_of(os.sched_getaffinity(0)), ranks, option="tensor_parallel")
    except InputError as error:
        raise ValueError(str(error)) from None
    return [("cpu", logical_processors(group), threads_for(len(group), ranks)) for group in groups]


def _config_on(config: EngineConfig, device: str) -> EngineConfig:
    """Return the config of one rank: the dtype is the same for all."""
    where = choose_device(device)
    dtype = str(choose_dtype(config.dtype, where)).removeprefix("torch.")
    return config.with_options(dtype=dtype, tensor_parallel=1, device=device)


def _step_of(batch: StepBatch) -> Step:
    counts = np.array(batch.query_lens, np.int32)
    starts = np.array(batch.contexts, np.int32) - counts
    return Step(batch.token_ids.cpu().numpy(), counts, starts, batch.tables, batch.logit_rows.cpu().numpy())
