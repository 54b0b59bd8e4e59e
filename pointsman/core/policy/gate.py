"""Gates: the conditions of an admission. A gate lowers the number of tokens of a waiting request, or defers it.

The gates are the token budget (`budget.py`), the limits (`limits.py`), the embeddings of encoder inputs
(`encoder_budget.py`), the caps on partial prefills (`partial_prefills.py`), the adapter slots (`adapters.py`), and the
blocks that must stay free (`reserve.py`). `step/admission.py` calls them in a fixed order. The first deferral gives the
reported reason, and says whether the request blocks the queue.

A `Limit` also applies to running rows, to all of them at once, on columns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.policy.policy import Policy
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]


class Gate:
    """One condition of an admission. The base admits everything and has no state."""

    revision = 0
    """Changes whenever `check` may return another result for the same request, tokens and free blocks. The verdict on a
    blocked head is kept until a revision changes."""

    def open_step(self, num_requests: int) -> None:
        """A step begins, with `num_requests` requests queued or running; the step does not change the number."""

    def open_queue(self) -> None:
        """The step begins to check the queue, from its head on and in order."""

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        """How many of `want` tokens from position `start` on the request may compute in this step (at least 1 if `want`
        is at least 1), or its deferral. Changes of state last for the step only."""
        return want

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        """The request computes these known tokens: it was admitted, or it runs and its prefill is partial. At most as
        many tokens as `check` or `clip` allowed."""

    def release(self, request: Request) -> None:
        """Called when the request has lost its row."""

    def guaranteed_steps(self, num_steps: int) -> int:
        """For how many of the next `num_steps` steps a deferral of this gate stays a deferral. In these steps every
        running request decodes one token, and nothing else happens."""
        return num_steps


class Limit(Gate, Policy):
    """A bound on the tokens that a request advances in a step."""

    kind = "limit"
    limits_decode = False
    """Whether it can lower the tokens of rows that all decode a single token."""
    limits_drafts = False
    """Whether it can lower the tokens of decoding rows that verify drafts."""
    is_shared = False
    """Whether rows share the limit: tokens of one row lower those of others."""
    only_cuts = False
    """Whether `check` only lowers the number of tokens: it never defers, and changes no state."""

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        """Whether steps would take too long if the request started beside `num_running` others with `num_tokens` known
        tokens. Then no running request is preempted for it."""
        return False

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        """Lower `want` ([rows] int64) in place."""
