"""Why did a running request get nothing in the last step? Worked out only when somebody asks.

It wants its next token and no limit of its own holds it back, so others took what a step has: its tokens, its rows, its
blocks, or the step as a whole, where prompts go before decoding.
"""

from __future__ import annotations

import numpy as np

from pointsman.core.batch import Batch
from pointsman.core.config import SchedulerConfig
from pointsman.core.output import SchedulerOutput
from pointsman.core.reason import Blocked, Reason
from pointsman.core.request import Request


def why_left_out(
    request: Request, batch: Batch, output: SchedulerOutput | None, config: SchedulerConfig
) -> Blocked | None:
    """Why a request that runs is not in the newest output, and how much it needs at least.

    None: it is, or has no row, or it waited for samples that have come back since.
    """
    if request.row is None or output is None or request in output.requests:
        return None
    pending = int(batch.num_pending[request.row])
    if pending:
        return Blocked(Reason.IN_FLIGHT, pending)
    decodes_alone = config.batching == "prefill-first" and request.phase != "prefill" and output.num_rows > 0
    if decodes_alone and _is_for_prompts(output):
        return Blocked(Reason.PREFILL_FIRST, 0)
    if output.total_num_scheduled_tokens >= config.max_num_batched_tokens:
        return Blocked(Reason.BUDGET, 1)
    if output.num_rows >= config.max_num_seqs:
        return Blocked(Reason.SEQUENCE_LIMIT, 1)
    if output.preempted:
        return Blocked(Reason.BLOCKS, 0)
    return Blocked(Reason.PREFILL_FIRST, 0) if decodes_alone else None  # for prompts that lacked one token each


def _is_for_prompts(output: SchedulerOutput) -> bool:
    """Whether a step is for prompts, of those that are for prompts or for decoding, as far as its rows tell."""
    is_long = np.any(output.num_scheduled_tokens - output.num_draft_tokens > 1)
    return bool(output.admitted) or bool(is_long) or not bool(output.samples.all())
