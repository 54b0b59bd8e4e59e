"""Makes the two events that only policies get: `on_advanced` (the tokens of a step) and `on_step_time` (its duration).

Policies are listeners. The two events are derived from the events of steps and updates, and only for policies that
override these two methods. For steps of a fast-forward, a policy gets the tokens of all steps together, and the times
of the steps one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from pointsman.core.policy.guard import Guard
from pointsman.core.policy.policy import Policy, StepLoad
from pointsman.core.state.events import Listener, StepDecision, StepRun
from pointsman.core.state.output import IntArray, SchedulerOutput, StepUpdate


def listeners_of(policies: Iterable[Any]) -> list[Listener]:
    """The listeners that report the events of the scheduler to `policies`."""
    found: list[Listener] = []
    advanced: list[Callable[..., None]] = []
    step_time: list[Callable[[StepLoad, float], None]] = []
    for policy in policies:
        inner = policy.policy if isinstance(policy, Guard) else policy
        if not isinstance(inner, Policy):
            continue
        # If a guarded policy fails in an event, the error is raised at the next call of this policy in a step.
        listener = policy.as_listener() if isinstance(policy, Guard) else inner
        found.append(listener)
        if type(inner).on_advanced is not Policy.on_advanced:
            advanced.append(listener.on_advanced)
        if type(inner).on_step_time is not Policy.on_step_time:
            step_time.append(listener.on_step_time)
    if advanced:
        found.append(_AdvanceReporter(advanced))
    if step_time:
        found.append(_StepTimeReporter(step_time))
    return found


class _AdvanceReporter(Listener):
    def __init__(self, methods: list[Callable[..., None]]) -> None:
        self._methods = methods

    def on_step(self, step: StepDecision) -> None:
        output = step.output
        assert output is not None
        if output.num_rows:
            for method in self._methods:
                method(output.requests, output.rows, output.num_scheduled_tokens)

    def on_steps(self, run: StepRun) -> None:
        num_tokens = np.full(len(run.rows), run.num_steps, dtype=np.int64)
        for method in self._methods:
            method(run.requests, run.rows, num_tokens)


class _StepTimeReporter(Listener):
    def __init__(self, methods: list[Callable[[StepLoad, float], None]]) -> None:
        self._methods = methods
        self._began: dict[int, float] = {}  # start of each step in flight, by step ID
        self._ended = -math.inf
        self._decoding: IntArray | None = None
        """Serials of the rows of the last updated step, if each row decoded one token; otherwise None. Serials, unlike
        requests, keep no finished request in memory."""
        self._context = 0

    def on_step(self, step: StepDecision) -> None:
        self._began[step.step_id] = step.now

    def on_failed(self, num_steps: int, now: float) -> None:
        for step_id in sorted(self._began)[-num_steps:]:
            del self._began[step_id]
        self._decoding = None

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        began = self._began.pop(output.step_id, now)
        if began < self._ended:
            began = self._ended
        self._ended = now
        serials, total = output.serials, output.total_num_scheduled_tokens
        num_rows = len(serials)
        if not num_rows:
            return
        if serials is self._decoding and total == num_rows:  # the same rows as in the previous step: no sum is needed
            attended = context = self._context + num_rows
        else:
            attended = context = int(np.add.reduce(output.num_computed_tokens)) + total
            if total > num_rows:
                attended = output.num_attended_tokens
        self._decoding, self._context = serials if total == num_rows else None, context
        self._report(StepLoad(total, num_rows, context, total - num_rows, attended), now - began)

    def on_steps(self, run: StepRun) -> None:
        num_rows = len(run.rows)
        context = int(np.add.reduce(run.num_computed_tokens))
        times = np.asarray(run.times).tolist()
        for began, ended in pairwise(times):
            context += num_rows
            self._report(StepLoad(num_rows, num_rows, context, 0, context), ended - began)
        self._ended = times[-1]
        self._decoding = None

    def _report(self, load: StepLoad, seconds: float) -> None:
        for method in self._methods:
            method(load, seconds)
