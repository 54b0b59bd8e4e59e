"""Pointsman: an LLM inference scheduler, as a library.

    from pointsman import Request, Scheduler, SchedulerConfig, StepResult   # the scheduler, for an engine of your own
    from pointsman import LLM, SamplingParams                               # the engine that comes with it

`import pointsman` needs NumPy alone: it has every public name of `pointsman.core`. The engine's names are imported on
first use, which needs `pip install 'pointsman[engine]'`. Import the other packages by name: `pointsman.server` (HTTP),
`pointsman.cli` (the command line), `pointsman.integrations` (other engines), `pointsman.traces` (request traces).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from pointsman.core import (
    Adapter,
    BackgroundFile,
    ConfigError,
    Copies,
    DuplicateRequest,
    EncoderEntry,
    EncoderInput,
    Explanation,
    FinishReason,
    Holder,
    InvalidTransition,
    InvariantError,
    KVConnector,
    KVGroup,
    Listener,
    Load,
    ParkReason,
    PauseMode,
    PointsmanError,
    PolicyError,
    PreemptionCause,
    ProposalError,
    Reason,
    Recorder,
    RecordingError,
    RepetitionDetectionParams,
    ReplayDifference,
    ReplayReport,
    Request,
    RequestEvent,
    RequestEventType,
    RequestRefused,
    RequestStatus,
    Save,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
    StepDecision,
    StepOrderError,
    StepResult,
    StepResultError,
    StepRun,
    StepUpdate,
    UnknownRequest,
    UnknownTransfer,
    replay,
)
from pointsman.version import __version__

if TYPE_CHECKING:
    from pointsman.engine import LLM, AsyncEngine, SamplingParams

__all__ = [
    "LLM",
    "Adapter",
    "AsyncEngine",
    "BackgroundFile",
    "ConfigError",
    "Copies",
    "DuplicateRequest",
    "EncoderEntry",
    "EncoderInput",
    "Explanation",
    "FinishReason",
    "Holder",
    "InvalidTransition",
    "InvariantError",
    "KVConnector",
    "KVGroup",
    "Listener",
    "Load",
    "ParkReason",
    "PauseMode",
    "PointsmanError",
    "PolicyError",
    "PreemptionCause",
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
    "SamplingParams",
    "Save",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "StepDecision",
    "StepOrderError",
    "StepResult",
    "StepResultError",
    "StepRun",
    "StepUpdate",
    "UnknownRequest",
    "UnknownTransfer",
    "__version__",
    "replay",
]

if not TYPE_CHECKING:  # hidden from type checkers, which would take every misspelt name for an `Any`
    _OF_THE_ENGINE = frozenset({"LLM", "AsyncEngine", "SamplingParams"})

    def __getattr__(name: str) -> object:
        if name not in _OF_THE_ENGINE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("pointsman.engine"), name)

    def __dir__() -> list[str]:
        return sorted(globals().keys() | _OF_THE_ENGINE)
