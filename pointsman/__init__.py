"""Pointsman: the scheduler of an LLM inference engine, as a library.

`import pointsman` needs NumPy alone. The engine (`pointsman.engine`) and the command line
(`pointsman.cli`) are extras and are imported where they are used.
"""

from pointsman.core import (
    DuplicateRequest,
    ParkReason,
    Request,
    RequestRefused,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepResult,
    StepUpdate,
)

__version__ = "0.1.0"

__all__ = [
    "DuplicateRequest",
    "ParkReason",
    "Request",
    "RequestRefused",
    "RequestStatus",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "StepResult",
    "StepUpdate",
    "__version__",
]
