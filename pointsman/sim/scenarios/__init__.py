"""Claims about schedulers, tested with the real one: `pointsman simulate --scenario NAME`.

`scenario.py` defines and runs a scenario. The scenarios are in `batching.py` (filling steps), `pressure.py` (a pool
short of blocks), `sharing.py` (the prefix cache), `urgency.py` (priorities) and `recommended.py` (settings for
workloads); their requests are in `workloads.py`. `picture.py` draws the findings of a scenario. `catalogue.py` has all
scenarios by name.
"""

from pointsman.sim.scenarios.catalogue import SCENARIOS, scenario
from pointsman.sim.scenarios.scenario import Check, Figure, Finding, Scenario, Variant

__all__ = ["SCENARIOS", "Check", "Figure", "Finding", "Scenario", "Variant", "scenario"]
