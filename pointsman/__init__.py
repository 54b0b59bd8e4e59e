"""Pointsman: an LLM inference scheduler, as a library.

    from pointsman import Request, Scheduler, SchedulerConfig, StepResult   # the scheduler, for an engine of your own
    from pointsman import LLM, SamplingParams                               # the engine that comes with it

`from pointsman import *` needs NumPy alone: these names come from `pointsman.core`, which is imported on first use. The
engine's names need `pip install 'pointsman[engine]'`. Import the other packages by name:
`pointsman.server` (HTTP), `pointsman.cli` (the command line), `pointsman.integrations` (other engines),
`pointsman.traces` (request traces).
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from warnings import warn as _warn

from pointsman.version import __version__

if TYPE_CHECKING:
    from pointsman.core import (
        UNSAMPLED,
        Adapter,
        BackgroundFile,
        ClockError,
        ConfigError,
        Copies,
        Demand,
        DuplicateRequest,
        EncoderEntry,
        EncoderInput,
        Eviction,
        Explanation,
        FinishReason,
        FirstComeFirstServed,
        Holder,
        InvalidTransition,
        InvariantError,
        KVCache,
        KVConnector,
        KVGroup,
        Limit,
        Listener,
        Load,
        Order,
        Parameter,
        ParkReason,
        PauseMode,
        PointsmanError,
        Policy,
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
        Reserve,
        Save,
        Scheduler,
        SchedulerConfig,
        SchedulerOutput,
        SchedulerStats,
        StepDecision,
        StepOrderError,
        StepResult,
        StepResultError,
        StepUpdate,
        UnknownRequest,
        UnknownTransfer,
        Victim,
        View,
        replay,
    )
    from pointsman.engine import LLM as LLM
    from pointsman.engine import AsyncEngine as AsyncEngine
    from pointsman.engine import SamplingParams as SamplingParams

__all__ = [
    "UNSAMPLED",
    "Adapter",
    "BackgroundFile",
    "ClockError",
    "ConfigError",
    "Copies",
    "Demand",
    "DuplicateRequest",
    "EncoderEntry",
    "EncoderInput",
    "Eviction",
    "Explanation",
    "FinishReason",
    "FirstComeFirstServed",
    "Holder",
    "InvalidTransition",
    "InvariantError",
    "KVCache",
    "KVConnector",
    "KVGroup",
    "Limit",
    "Listener",
    "Load",
    "Order",
    "Parameter",
    "ParkReason",
    "PauseMode",
    "PointsmanError",
    "Policy",
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
    "Reserve",
    "Save",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "StepDecision",
    "StepOrderError",
    "StepResult",
    "StepResultError",
    "StepUpdate",
    "UnknownRequest",
    "UnknownTransfer",
    "Victim",
    "View",
    "__version__",
    "replay",
]

if not TYPE_CHECKING:  # hidden from type checkers, which would take every misspelt name for an `Any`
    _OF_THE_ENGINE = frozenset({"LLM", "AsyncEngine", "SamplingParams"})

    def __getattr__(name: str) -> object:
        if name in _OF_THE_ENGINE:
            return getattr(_import_module("pointsman.engine"), name)
        if name == "core":  # the command line prints its help without it
            return _import_module("pointsman.core")
        if name == "StepRun":
            _warn("`StepRun` is now imported from `pointsman.core`", DeprecationWarning, stacklevel=2)
        elif name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module("pointsman.core"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, "__doc__"} | _OF_THE_ENGINE)
