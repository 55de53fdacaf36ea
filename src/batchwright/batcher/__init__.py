"""Batching of single requests in front of any model function, based on asyncio. Does not need torch."""

from batchwright.batcher.batcher import Batcher
from batchwright.batcher.batcher_stats import BatcherStats, ContinuousStats
from batchwright.batcher.continuous import ContinuousBatcher, TokenModel
from batchwright.batcher.decorator import AsyncBatched, SyncBatched, batched
from batchwright.batcher.memory_efficient import MemoryEfficientBatcher
from batchwright.batcher.model import BatchModel, Model, RequestModel, StepModel, StreamModel, WrongOutputs
from batchwright.batcher.named import (
    AdaptiveBatcher,
    LengthAwareBatcher,
    PrioritizedRequest,
    PriorityBatcher,
    SimpleBatcher,
    TimeBasedBatcher,
)
from batchwright.batcher.processor import AsyncBatchConfig, AsyncBatchProcessor, ParallelBatchProcessor
from batchwright.batcher.streaming import StreamingBatchProcessor

__all__ = [
    "AdaptiveBatcher",
    "AsyncBatchConfig",
    "AsyncBatchProcessor",
    "AsyncBatched",
    "BatchModel",
    "Batcher",
    "BatcherStats",
    "ContinuousBatcher",
    "ContinuousStats",
    "LengthAwareBatcher",
    "MemoryEfficientBatcher",
    "Model",
    "ParallelBatchProcessor",
    "PrioritizedRequest",
    "PriorityBatcher",
    "RequestModel",
    "SimpleBatcher",
    "StepModel",
    "StreamModel",
    "StreamingBatchProcessor",
    "SyncBatched",
    "TimeBasedBatcher",
    "TokenModel",
    "WrongOutputs",
    "batched",
]
