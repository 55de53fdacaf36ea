"""Batching of single requests in front of any model function, on asyncio. Needs no torch."""

from batchwright.batcher.batcher import Batcher
from batchwright.batcher.decorator import AsyncBatched, SyncBatched, batched
from batchwright.batcher.model import BatchModel, Model, RequestModel, WrongOutputs
from batchwright.batcher.named import (
    AdaptiveBatcher,
    LengthAwareBatcher,
    PriorityBatcher,
    SimpleBatcher,
    TimeBasedBatcher,
)
from batchwright.batcher.processor import AsyncBatchConfig, AsyncBatchProcessor, ParallelBatchProcessor
from batchwright.batcher.stats import BatcherStats

__all__ = [
    "AdaptiveBatcher",
    "AsyncBatchConfig",
    "AsyncBatchProcessor",
    "AsyncBatched",
    "BatchModel",
    "Batcher",
    "BatcherStats",
    "LengthAwareBatcher",
    "Model",
    "ParallelBatchProcessor",
    "PriorityBatcher",
    "RequestModel",
    "SimpleBatcher",
    "SyncBatched",
    "TimeBasedBatcher",
    "WrongOutputs",
    "batched",
]
