"""The work of a step: which requests advance, and when others are admitted. Chosen once, by `batching`.

idle                 nothing; in place of the others while the scheduler is paused
mixed (and static)   every running row advances, then requests are admitted
prefill-first        rows that still compute their prompt advance and requests are admitted; only if neither gives
                     the step anything to do, the rows that decode advance
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pointsman.core.state.request import Request
from pointsman.core.step.in_flight import StepRecord
from pointsman.core.step.in_order import InOrder
from pointsman.core.step.request_table import Lifecycle
from pointsman.core.step.running import Advance, Running

Admit = Callable[[StepRecord, Advance, Request | None, float], None]


class Work(Protocol):
    """Decides a step, and commits to it; `displacer` is whom others made room for before."""

    def __call__(self, record: StepRecord, displacer: Request | None, now: float) -> Advance: ...


class Idle:
    """No row advances, and nobody is admitted."""

    def __init__(self, running: Running, admit: Admit) -> None:
        self._running = running
        self._admit = admit

    def __call__(self, record: StepRecord, displacer: Request | None, now: float) -> Advance:
        advance = self._running.rest()
        self._admit(record, advance, None, now)  # finds the door closed, and notes why the head waits
        return advance


class Mixed:
    """Prompts and decoding in one step."""

    def __init__(self, running: Running, life: Lifecycle, publish: Callable[[Request], None], admit: Admit) -> None:
        self._running = running
        self._life = life
        self._publish = publish
        self._admit = admit

    def __call__(self, record: StepRecord, displacer: Request | None, now: float) -> Advance:
        advance = self._advance()
        for request in advance.unpublished:
            self._publish(request)
        self._admit(record, advance, displacer, now)
        return advance

    def _advance(self) -> Advance:
        return self._running.advance(len(self._life.in_flight) > 0, self._life.preempt)


class PrefillFirst(Mixed):
    """A step is for prompts or for decoding (nano-vLLM's and miniVLLM's two phases)."""

    _running: InOrder

    def __call__(self, record: StepRecord, displacer: Request | None, now: float) -> Advance:
        prefills = super().__call__(record, displacer, now)
        if prefills.total or record.admitted:
            return prefills
        in_flight = len(self._life.in_flight) > 0
        return self._running.advance_decodes(in_flight, self._life.preempt, gave_way=prefills.preempted)

    def _advance(self) -> Advance:
        return self._running.advance_prefills(self._life.preempt)


def make_work(
    running: Running, life: Lifecycle, publish: Callable[[Request], None], admit: Admit, batching: str
) -> Work:
    """The work that `batching` names."""
    if batching == "prefill-first":
        assert isinstance(running, InOrder), "checked by the configuration"
        return PrefillFirst(running, life, publish, admit)
    return Mixed(running, life, publish, admit)
