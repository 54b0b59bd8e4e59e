"""The scheduler: NumPy and the standard library only, and it knows no host."""

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import (
    ConfigError,
    DuplicateRequest,
    InvalidTransition,
    InvariantError,
    PointsmanError,
    ProposalError,
    RequestRefused,
    StepOrderError,
    StepResultError,
    UnknownRequest,
    UnknownTransfer,
)
from pointsman.core.kv.connector import KVConnector
from pointsman.core.observe.stats import Explanation, SchedulerStats
from pointsman.core.recording import Recorder, RecordingError, ReplayDifference, ReplayReport, replay
from pointsman.core.scheduler import Scheduler
from pointsman.core.state.inputs import Adapter, EncoderEntry, EncoderInput
from pointsman.core.state.output import Load, Save, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.state.reason import Holder, Reason
from pointsman.core.state.repetition import RepetitionDetectionParams
from pointsman.core.state.request import Request
from pointsman.core.state.status import (
    FinishReason,
    ParkReason,
    PauseMode,
    RequestEvent,
    RequestEventType,
    RequestStatus,
)

__all__ = [
    "Adapter",
    "ConfigError",
    "DuplicateRequest",
    "EncoderEntry",
    "EncoderInput",
    "Explanation",
    "FinishReason",
    "Holder",
    "InvalidTransition",
    "InvariantError",
    "KVConnector",
    "Load",
    "ParkReason",
    "PauseMode",
    "PointsmanError",
    "ProposalError",
    "Reason",
    "Recorder",
    "RecordingError",
    "RepetitionDetectionParams",
    "ReplayDifference",
    "ReplayReport",
    "Request",
    "RequestEvent",
    "RequestEventType",
    "RequestRefused",
    "RequestStatus",
    "Save",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "StepOrderError",
    "StepResult",
    "StepResultError",
    "StepUpdate",
    "UnknownRequest",
    "UnknownTransfer",
    "replay",
]
