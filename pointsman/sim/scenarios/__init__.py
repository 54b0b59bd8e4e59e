"""Claims about schedulers, tested with the real one: `pointsman simulate --scenario NAME`.

`scenario.py` says what a scenario is and runs it. The scenarios are in `batching.py` (how steps are filled),
`pressure.py` (what if blocks run out), `sharing.py` (the prefix cache), `urgency.py` (priorities) and `recommended.py`
(settings for workloads); what they send, in `workloads.py`. `picture.py` draws what one found. `catalogue.py` has them
by name.
"""

from pointsman.sim.scenarios.catalogue import SCENARIOS, scenario
from pointsman.sim.scenarios.scenario import Check, Figure, Finding, Scenario, Variant

__all__ = ["SCENARIOS", "Check", "Figure", "Finding", "Scenario", "Variant", "scenario"]
