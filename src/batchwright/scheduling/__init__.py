"""Decisions about which tokens of which sequences go into the next step, without computing them."""

from batchwright.scheduling.drafting import Drafter, EndedAnswers, EndedAnswersByOwner
from batchwright.scheduling.plan import Chunk, StepPlan, repeated
from batchwright.scheduling.scheduler import Scheduler
from batchwright.scheduling.sequence import Sequence, Status
from batchwright.scheduling.slo import SloController

__all__ = [
    "Chunk",
    "Drafter",
    "EndedAnswers",
    "EndedAnswersByOwner",
    "Scheduler",
    "Sequence",
    "SloController",
    "Status",
    "StepPlan",
    "repeated",
]
