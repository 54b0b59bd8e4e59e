"""The scheduler: decides which requests run in a step, and how many tokens of each request the step computes.

This package imports only NumPy and the standard library, and is independent of hosts. Begin with `scheduler.py`.

    state/    requests, and the columns of the batch     kv/      blocks, block tables and the prefix cache
    policy/   orders, limits, reserves and victims       step/    the parts of a step
    observe/  statistics, explanations and films

A host creates a `Request`, calls the scheduler's methods and reads their results. Requests, outputs, updates and
explanations are read-only: writing to them raises. All other return values are the caller's own copies. `scheduler.py`
has the full rules.
"""

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import (
    ClockError,
    ConfigError,
    DuplicateRequest,
    InvalidTransition,
    InvariantError,
    PointsmanError,
    PolicyError,
    ProposalError,
    RequestRefused,
    StepOrderError,
    StepResultError,
    UnknownRequest,
    UnknownTransfer,
)
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.connector import KVConnector
from pointsman.core.observe.explain import Explanation
from pointsman.core.observe.side_file import BackgroundFile
from pointsman.core.observe.stats import SchedulerStats
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.gate import Limit
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.policy.reserve import Demand, Reserve
from pointsman.core.recording import Recorder, RecordingError
from pointsman.core.replay import ReplayDifference, ReplayReport, replay
from pointsman.core.scheduler import Scheduler
from pointsman.core.state.events import Listener, StepDecision, StepRun
from pointsman.core.state.inputs import Adapter, EncoderEntry, EncoderInput
from pointsman.core.state.interfaces import Eviction, Order, Victim, View
from pointsman.core.state.layout import KVGroup
from pointsman.core.state.output import Copies, Load, Save, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.state.reason import Holder, Reason
from pointsman.core.state.repetition import RepetitionDetectionParams
from pointsman.core.state.request import Request
from pointsman.core.state.status import (
    FinishReason,
    ParkReason,
    PauseMode,
    PreemptionCause,
    RequestEvent,
    RequestEventType,
    RequestStatus,
)

__all__ = [
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
    "StepRun",
    "StepUpdate",
    "UnknownRequest",
    "UnknownTransfer",
    "Victim",
    "View",
    "replay",
]
