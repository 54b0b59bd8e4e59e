"""The Azure requests of four tenants, one of which sends most of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
from _policy_azure import CONFIG, SPEEDS, STEP_TIME, requests
from _policy_scenario import Scenario, scaled

from pointsman.sim.workload import Arrival

HEAVY, LIGHT = "heavy", ("light-1", "light-2", "light-3")
HEAVY_SHARE = 0.7
SEED = 7


@cache
def of_tenants() -> list[Arrival]:
    """The Azure requests, each with a tenant drawn at random."""
    rng = np.random.default_rng(SEED)
    shares = [HEAVY_SHARE, *[(1 - HEAVY_SHARE) / len(LIGHT)] * len(LIGHT)]
    tenants = rng.choice([HEAVY, *LIGHT], size=len(requests()), p=shares).tolist()
    return [
        (time, replace(request, tenant=tenant)) for (time, request), tenant in zip(requests(), tenants, strict=True)
    ]


TENANTS = Scenario(
    name="tenants",
    about="azure, 70 % of the requests from one tenant, the others from three",
    arrivals=lambda speed: scaled(of_tenants(), speed),
    config=CONFIG,
    step_time=STEP_TIME,
    speeds=SPEEDS,
)
