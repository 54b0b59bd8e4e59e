"""Gates: may this waiting request start now, and with how many tokens; if not, why, and does it block the queue?

Every condition of an admission answers this one question: the token budget (`budget.py`), the limits
(`limits.py`), the embeddings
of encoder inputs (`encoder_budget.py`), the caps on partial prefills (`partial_prefills.py`), the adapter slots
(`adapters.py`), and the blocks that must stay free (`reserve.py`). `step/admission.py` asks them in a fixed order.
Each lowers the number of tokens or defers the request; the first deferral is the reason that is reported.

A limit on running rows answers the same question for all of them at once, on columns: see `Limit`.
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
    """Changes whenever `check` may answer otherwise for the same request, tokens and free blocks. The verdict on a
    blocked head is kept until a revision changes."""

    def open_step(self, num_requests: int) -> None:
        """A step begins, with `num_requests` requests queued or running; the step does not change the number."""

    def open_queue(self) -> None:
        """The step begins to check the queue, from its head on and in order."""

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        """How many of `want` tokens from position `start` on the request may compute in this step, at least 1 if `want`
        is; or why it is deferred. Any state it changes lasts for the step only."""
        return want

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        """The request computes these known tokens: it was admitted, or it is a running row with a partial prefill. At
        most what `check` or `clip` allowed."""

    def release(self, request: Request) -> None:
        """The request has lost its row."""

    def guaranteed_steps(self, num_steps: int) -> int:
        """For how many of the next `num_steps` steps, in which every running request decodes one token and nothing
        else happens, a deferral of this gate stays a deferral."""
        return num_steps


class Limit(Gate, Policy):
    """One bound on the tokens that a request advances in a step."""

    kind = "limit"
    limits_decode = False
    """Whether steady decoding, where every row wants a single token, must ask it."""
    limits_drafts = False
    """Whether it must be asked where decoding rows want drafts verified beside that token."""
    is_shared = False
    """Whether what one row takes is unavailable to others."""
    only_cuts = False
    """Whether `check` lowers the tokens at most: it never defers, and changes nothing."""

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        """Whether the request may not start beside `num_running` others with `num_tokens` known tokens, since steps
        would take too long. Nobody gives way to it then."""
        return False

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        """Lower `want` [rows] int64 in place."""
