"""The scheduler: NumPy and the standard library only, and it knows no host."""

from pointsman.core.adapters import Adapter
from pointsman.core.config import SchedulerConfig
from pointsman.core.encoder_inputs import EncoderEntry, EncoderInput
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
from pointsman.core.kv_connector import KVConnector, Load, Save
from pointsman.core.output import SchedulerOutput, StepResult, StepUpdate
from pointsman.core.pause import PauseMode
from pointsman.core.reason import Holder, Reason
from pointsman.core.recording import Recorder, RecordingError, ReplayDifference, ReplayReport, replay
from pointsman.core.repetition import RepetitionDetectionParams
from pointsman.core.request import Request
from pointsman.core.request_events import RequestEvent, RequestEventType
from pointsman.core.scheduler import Scheduler
from pointsman.core.stats import Explanation, SchedulerStats
from pointsman.core.status import FinishReason, ParkReason, RequestStatus

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
