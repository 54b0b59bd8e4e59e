"""The Azure requests of four tenants, one of which sends most of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from _policy_azure import CONFIG, LATE_SPEEDS, SPEEDS, STEP_TIME, late_requests, requests
from _policy_scenario import Scenario, scaled

from pointsman.sim.workload import Arrival

HEAVY, LIGHT = "heavy", ("light-1", "light-2", "light-3")


def _of_tenants(arrivals: Sequence[Arrival], heavy_share: float, seed: int) -> list[Arrival]:
    """The requests, each with a tenant drawn at random."""
    rng = np.random.default_rng(seed)
    shares = [heavy_share, *[(1 - heavy_share) / len(LIGHT)] * len(LIGHT)]
    tenants = rng.choice([HEAVY, *LIGHT], size=len(arrivals), p=shares).tolist()
    return [(time, replace(request, tenant=tenant)) for (time, request), tenant in zip(arrivals, tenants, strict=True)]


@cache
def of_tenants() -> list[Arrival]:
    return _of_tenants(requests(), 0.7, seed=7)


@cache
def late_of_tenants() -> list[Arrival]:
    return _of_tenants(late_requests(), 0.5, seed=107)


TENANTS = Scenario(
    name="tenants",
    about="azure, 70 % of the requests from one tenant, the others from three",
    arrivals=lambda speed: scaled(of_tenants(), speed),
    config=CONFIG,
    step_time=STEP_TIME,
    speeds=SPEEDS,
)
TENANTS_LATE = Scenario(
    name="tenants-late",
    about="azure-late, 50 % of the requests from one tenant, the others from three",
    arrivals=lambda speed: scaled(late_of_tenants(), speed),
    config=CONFIG,
    step_time=STEP_TIME,
    speeds=LATE_SPEEDS,
)
