"""The catalogue of scenarios."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pointsman.sim.errors import UnknownName
from pointsman.sim.scenarios.batching import CHUNK_SIZE, STATIC_BATCHING
from pointsman.sim.scenarios.pressure import FULL_SEQUENCE, PREEMPTION_RECOVERY, PREEMPTION_RESPONSES, WATERMARK
from pointsman.sim.scenarios.recommended import RECOMMENDED_SETTINGS
from pointsman.sim.scenarios.scenario import Scenario
from pointsman.sim.scenarios.sharing import PREFIX_REUSE
from pointsman.sim.scenarios.urgency import PRIORITY_INVERSION

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        each.name: each
        for each in (
            STATIC_BATCHING,
            CHUNK_SIZE,
            WATERMARK,
            FULL_SEQUENCE,
            PREFIX_REUSE,
            PREEMPTION_RECOVERY,
            PRIORITY_INVERSION,
            PREEMPTION_RESPONSES,
            RECOMMENDED_SETTINGS,
        )
    }
)


def scenario(name: str) -> Scenario:
    """The scenario called `name`.

    Raises:
        UnknownName: no scenario has that name.
    """
    found = SCENARIOS.get(name.lower())
    if found is None:
        raise UnknownName.nearest_to(name, "scenario", SCENARIOS)
    return found
