"""Decisions about which requests are computed together, and when. Pure: time is an argument. Needs no torch.

A policy is an order × a shape × a timing; `policy.py` describes each. The functions here create the usual ones.
"""

from batchwright.policies.adaptive import TargetLatency, adaptive
from batchwright.policies.auto import Goodput, LatencyCappedBatches, auto
from batchwright.policies.backlog import Backlog
from batchwright.policies.latency import LatencyModel
from batchwright.policies.lengths import LikeLengths, length_aware
from batchwright.policies.memory import Memory, WithinMemory, within_memory
from batchwright.policies.orders import FairShare, Urgency, priority
from batchwright.policies.policy import (
    AtOnce,
    BatchPolicy,
    Dispatch,
    Fifo,
    Item,
    Order,
    Policy,
    Reason,
    Shape,
    Timing,
    Wait,
)
from batchwright.policies.simple import BySize, MaxWait, Window, simple, window

__all__ = [
    "AtOnce",
    "Backlog",
    "BatchPolicy",
    "BySize",
    "Dispatch",
    "FairShare",
    "Fifo",
    "Goodput",
    "Item",
    "LatencyCappedBatches",
    "LatencyModel",
    "LikeLengths",
    "MaxWait",
    "Memory",
    "Order",
    "Policy",
    "Reason",
    "Shape",
    "TargetLatency",
    "Timing",
    "Urgency",
    "Wait",
    "Window",
    "WithinMemory",
    "adaptive",
    "auto",
    "length_aware",
    "priority",
    "simple",
    "window",
    "within_memory",
]
