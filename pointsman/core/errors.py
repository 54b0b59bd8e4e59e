"""Errors that the scheduler raises. Each message names the value, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question for an error about an unknown `name`, with a space at its end; "" if no name in `known` is similar."""
    near = get_close_matches(name[:80], list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


class PointsmanError(Exception):
    """Base class of every error that the scheduler raises on purpose."""


class ConfigError(PointsmanError, ValueError):
    """A knob, or a combination of knobs, that cannot work or would have no effect."""


class RequestRefused(PointsmanError, ValueError):
    """A request that can never run. Its status is FINISHED_REFUSED; the scheduler does not keep the request."""


class DuplicateRequest(PointsmanError, ValueError):
    """A request id that is still in use: no scheduler output has reported that its request finished."""


class UnknownRequest(PointsmanError, KeyError):
    """A request id that the scheduler does not hold."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnknownTransfer(PointsmanError, KeyError):
    """A transfer id that is not in use: no such transfer began, or its end has been reported."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidTransition(PointsmanError, RuntimeError):
    """A change of status that a request's state machine does not allow."""


class StepOrderError(PointsmanError, RuntimeError):
    """A step out of order: steps must be updated, or failed, in the order in which they were scheduled."""


class ClockError(PointsmanError, ValueError):
    """A call whose time is before the time of an earlier call. The call has changed nothing."""


class StepResultError(PointsmanError, ValueError):
    """A step result that does not fit its output. No part of the result was applied."""


class ProposalError(PointsmanError, ValueError):
    """Proposed drafts that do not fit their output. No draft was kept."""


class InvariantError(PointsmanError, AssertionError):
    """A broken promise of the scheduler. The message names the promise."""


class PolicyError(PointsmanError, RuntimeError):
    """A policy that raised, or broke its contract. The step that called it is void; no request is lost.

    Args:
        message: the error message, which names the policy.
        what: description of the failure, without the policy's name; may be empty.
    """

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what
