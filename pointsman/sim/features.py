"""Features of a simulated engine beside plain steps: drafts, and the cost of adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pointsman.core import SchedulerConfig
from pointsman.sim.errors import SimulationError
from pointsman.sim.speculation import Speculation


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What an engine does in its steps beside computing the scheduled tokens.

    Raises:
        SimulationError: `adapter_share` is negative or not finite.
    """

    speculation: Speculation | None = None
    """The drafts; None: the engine proposes none."""
    adapter_share: float = 0.0
    """Additional time of a step with at least one request that has an adapter (LoRA), as a share of the step's own
    time."""

    def __post_init__(self) -> None:
        if not 0 <= self.adapter_share < math.inf:
            raise SimulationError(f"adapter_share is {self.adapter_share}; it must be finite and at least 0")

    def check(self, config: SchedulerConfig) -> None:
        """Check that the scheduler's configuration fits.

        Raises:
            SimulationError: the configuration has drafts and the engine proposes none, or see `Speculation.check`.
        """
        if self.speculation is not None:
            self.speculation.check(config)
        elif config.num_draft_tokens:
            raise SimulationError(
                f"num_draft_tokens is {config.num_draft_tokens}, and it is not known how many drafts are accepted; "
                "give the acceptance, or set num_draft_tokens to 0"
            )


PLAIN = Features()
"""An engine without drafts, whose adapters cost nothing."""
