"""The base class of policies. A policy makes a decision that can be exchanged: by name, with parameters.

    kind      what it decides                                    its interface               the built-in ones
    order     which waiting request is next                      `state/interfaces.py`       `order.py`
    victim    which running request is preempted for memory      `state/interfaces.py`       `victim.py`
    reserve   how many blocks an admission leaves free           `reserve.py`                `reserve.py`
    limit     how many tokens a request, or a step, advances     `gate.py`                   `limits.py`
    eviction  which cached blocks are evicted last               `state/interfaces.py`       `eviction.py`

A policy is given by name, with parameters (`shortest-prefill:ageing=200`), or as an object; `registry.py` finds it. It
reads a `View` and never moves a request. It is deterministic: it reads no clock, sorts stably, and iterates over no
set. A policy of another package has a guard (`guard.py`): if the policy raises, or breaks its contract, the step fails
with its name, and no request is lost.
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
    """One parameter of a policy. It has the type of its default."""

    name: str
    default: Value
    low: float | None = None
    """Minimum; None: no bound, or not a number."""
    high: float | None = None
    choices: tuple[Value, ...] = ()
    """The allowed values; empty: any value within the bounds."""
    tried: tuple[Value, ...] = ()
    """Values that a search tries (`pointsman tune`), in order."""
    doc: str = ""


class Policy(Listener):
    """Base of the policies. It is also a listener, and may override any event of `state/events.py`.

    A subclass has a `name` and a `kind`; the first line of its docstring is shown in lists. Its constructor takes the
    parameters as keywords.
    """

    kind: ClassVar[str] = ""
    name: str = ""
    version: ClassVar[int] = 1
    """Increased when the same calls lead to other decisions than before; a recording replays with the same version."""
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    reads: ClassVar[frozenset[str]] = frozenset()
    """The optional fields of requests that it reads: "priority", "tenant", "ttft_target", "retention"."""

    def attach(self, view: View) -> None:
        """Begin to serve one scheduler; the policy may keep its view. Called again when a recording begins: the policy
        then forgets everything that it learned, as a replay starts without it."""

    def guaranteed_steps(self, num_steps: int) -> int:
        """For how many of the next `num_steps` steps it decides as now. In these steps every running request decodes
        one token, and nothing else happens. 0: every step is decided on its own."""
        return 0

    def on_advanced(
        self, requests: tuple[Request, ...], rows: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> None:
        """These requests, in these rows, advance by `num_tokens` ([n] int64), in one step or in several at once."""

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        """The time of a step: from its start, or the end of the step before if later, until its result arrived."""


class StepLoad(NamedTuple):
    """The work of a step."""

    num_tokens: int
    num_requests: int
    num_context_tokens: int
    """Computed tokens of its requests, those of this step included: the KV that is read."""
    num_prefill_tokens: int
    """The step's tokens beyond one per request."""
    num_attended_tokens: int
    """Sum over its tokens of the positions that each attends to, its own included. Equal to `num_context_tokens` if
    each request computes one token."""


def spec_of(policy: object) -> str:
    """The policy as text: its name, and its parameters that differ from the default."""
    return written(policy.name, getattr(policy, "_given_parameters", {}))  # type: ignore[attr-defined]


def written(name: str, given: Mapping[str, Value]) -> str:
    """A policy with these parameters as text, `name:key=value,key=value`."""
    return name + (":" + ",".join(f"{key}={value}" for key, value in given.items()) if given else "")
