"""Gates: the conditions of an admission. A gate lowers the number of tokens of a waiting request, or defers the
request.

The gates are the token budget (`budget.py`), the limits (`limits.py`), the embeddings of encoder inputs
(`encoder_budget.py`), the caps on partial prefills (`partial_prefills.py`), the adapter slots (`adapters.py`), and the
blocks that must stay free (`reserve.py`). `step/admission.py` calls them in a fixed order. The first deferral gives the
reported reason, and says whether the request blocks the queue.

A `Limit` also applies to running rows: one call handles the columns of all rows.
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
    """One condition of an admission. This base class admits every request and has no state."""

    revision = 0
    """A number that changes whenever `check` may return another result for the same request, tokens and free blocks.
    The deferral of the head of the queue is kept until the revision of a gate changes."""

    def open_step(self, num_requests: int) -> None:
        """Called when a step begins. `num_requests` is the number of queued and running requests together, which stays
        the same during the step."""

    def open_queue(self) -> None:
        """Called when the step begins to check the queue, in order from its head on."""

    def close_queue(self, num_left: int) -> None:
        """Called when the step has admitted requests, unless it is closed to admissions after a preemption or during a
        pause. `num_left` is the number of requests that are still queued, without the skipped ones."""

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        """Returns how many of `want` tokens from position `start` on the request may compute in this step (at least 1
        if `want` is at least 1), or the deferral of the request. If the call changes the state of the gate, the change
        lasts for the step only."""
        return want

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        """Called when the step includes `num_tokens` known tokens of the request from position `start` on, at most as
        many as `check` or `clip` allowed. The request was just admitted, or runs with a partial prefill."""

    def release(self, request: Request) -> None:
        """Called when the request has lost its row."""

    def guaranteed_steps(self, num_steps: int) -> int:
        """Number of the next `num_steps` steps in which this gate still defers a request that it defers now. In these
        steps every running request decodes one token, and nothing else happens."""
        return num_steps


class Limit(Gate, Policy):
    """A bound on the tokens that a request advances in a step."""

    kind = "limit"
    limits_decode = False
    """Whether the limit can lower the tokens of rows that all decode a single token."""
    limits_drafts = False
    """Whether the limit can lower the tokens of decoding rows that verify drafts."""
    is_shared = False
    """Whether rows share the limit, so that tokens of one row lower the limit of other rows."""
    only_cuts = False
    """Whether `check` only lowers the number of tokens, never defers, and changes no state."""

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        """Whether steps would take too long if the request started beside `num_running` running requests with
        `num_tokens` known tokens together. Then no running request is preempted for this request."""
        return False

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        """Lower `want` ([rows] int64), the number of tokens that each row may compute in this step, in place."""
