"""Pausing: the operator stops the machine, or only its door, and lets it go on later; to change weights, say.

Nothing is lost by it: requests may still be added, ended and parked, steps in flight end as ever, and what is queued or
parked stays where it is. A paused scheduler answers `schedule` all the same: the step is empty, or admits nobody.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class PauseMode(enum.Enum):
    """What a paused scheduler does not do."""

    ALL = "all"
    """It schedules nothing. What runs keeps its blocks, and goes on where it stood."""
    ADMISSIONS = "admissions"
    """It admits nobody, whoever was preempted meanwhile included; what runs goes on, until nothing does."""


class Pause(NamedTuple):
    """A pause that lasts."""

    mode: PauseMode
    since: float
    """When it was asked for, on the caller's clock."""
