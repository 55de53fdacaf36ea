"""Which tokens of which sequences go into the next step. Decides, computes nothing."""

from batchwright.scheduling.scheduler import Chunk, Scheduler, StepPlan
from batchwright.scheduling.sequence import Sequence, Status

__all__ = ["Chunk", "Scheduler", "Sequence", "Status", "StepPlan"]
