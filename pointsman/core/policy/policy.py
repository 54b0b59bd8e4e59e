"""The base class of policies. A policy makes one kind of decision of the scheduler, and can be exchanged.

    kind      what it decides                                    interface                   built-in policies
    order     which waiting request is next                      `state/interfaces.py`       `order.py`
    victim    which running request is preempted for memory      `state/interfaces.py`       `victim.py`
    reserve   how many blocks an admission leaves free           `reserve.py`                `reserve.py`
    limit     how many tokens a request, or a step, advances     `gate.py`                   `limits.py`
    eviction  which cached blocks are evicted last               `state/interfaces.py`       `eviction.py`

A policy is given by name, with parameters (`shortest-prefill:ageing=200`), or as an object; `registry.py` looks up
names. A policy reads a `View` and never moves a request. It is deterministic: it reads no clock, sorts stably, and
iterates over no set. A policy of another package has a guard (`guard.py`): if the policy raises, or breaks its
contract, the step fails with an error that names the policy, and no request is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core.state.events import Listener
from pointsman.core.state.interfaces import View
from pointsman.core.state.request import Request

Value: TypeAlias = bool | int | float | str


class Parameter(NamedTuple):
    """One parameter of a policy. The type of `default` is the type of the parameter's values."""

    name: str
    default: Value
    low: float | None = None
    """Minimum value; None: no minimum, or the values are not numbers. `high` is the maximum."""
    high: float | None = None
    choices: tuple[Value, ...] = ()
    """The allowed values; empty: any value within the bounds."""
    tried: tuple[Value, ...] = ()
    """Values that a search for good parameters (`pointsman tune`) tries, in order."""
    doc: str = ""


class Policy(Listener):
    """Base class of the policies. A policy is also a listener, and may override any event of `state/events.py`.

    A subclass has a `name` and a `kind`; lists of policies show the first line of its docstring. Its constructor takes
    the values of `parameters` as keywords.
    """

    kind: ClassVar[str] = ""
    name: str = ""
    version: ClassVar[int] = 1
    """Version of the decisions, increased when the same calls lead to other decisions; a recording replays only with
    the version that made it."""
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    reads: ClassVar[frozenset[str]] = frozenset()
    """Optional fields of requests that the policy reads: "priority", "tenant", "ttft_target", "retention"."""

    def attach(self, view: View) -> None:
        """Begin to serve one scheduler; the policy may keep the view. Called again when a recording begins: the policy
        then forgets everything that it learned, as a replay starts without that knowledge."""

    def guaranteed_steps(self, num_steps: int) -> int:
        """For how many of the next `num_steps` steps the decisions of the policy stay the same. In these steps every
        running request decodes one token, and nothing else happens. 0: the policy must be called in every step."""
        return 0

    def on_advanced(
        self, requests: tuple[Request, ...], rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> None:
        """Called when requests (in `rows` of the batch) advance by `num_tokens` ([requests] int64), in one step, or in
        several steps that are reported together."""

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        """Called with the duration of a step. It ends when the result of the step arrives. It begins at the start of
        the step, or at the end of the previous step if this is later."""


class StepLoad(NamedTuple):
    """The amount of work in a step."""

    num_tokens: int
    num_requests: int
    num_context_tokens: int
    """Computed tokens of the step's requests, this step's tokens included: the KV entries that the step reads."""
    num_prefill_tokens: int
    """Number of tokens of the step, minus one for each request."""
    num_attended_tokens: int
    """Number of positions that a token of the step attends to (its own included), summed over these tokens. Equal to
    `num_context_tokens` if each request computes one token."""


def spec_of(policy: object) -> str:
    """The policy as text: its name, and the parameters that differ from their defaults."""
    return written(policy.name, getattr(policy, "_given_parameters", {}))  # type: ignore[attr-defined]


def written(name: str, given: Mapping[str, Value]) -> str:
    """The text `name:key=value,key=value` for a policy with `given` parameters."""
    return name + (":" + ",".join(f"{key}={value}" for key, value in given.items()) if given else "")
