"""Reserves: blocks that must stay free when a request is admitted.

Reserves add up: a request is admitted if its first chunk and all reserves together fit into the free blocks. Running
requests may use the reserved blocks, which are headroom for their growth. The gate `Reserves` adds the reserves up.

To add a reserve, write a subclass of `Reserve`, and name it in `RESERVES` at the end of this file; or put it into a
package of its own (`registry.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.cache import KVCache
from pointsman.core.policy.gate import Gate
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.policy.view import SchedulerView
from pointsman.core.state.events import Admitted, Preempted
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple
from pointsman.core.state.status import FinishReason

MEAN_OVER = 128
"""Number of last finished requests over which `decode_reserve="mean"` averages the output lengths: large enough to be
steady, small enough to follow a change of traffic within minutes."""
LEARNED_OVER = 512
"""Number of last finished requests from which `growth` learns; more than `MEAN_OVER`, since `growth` also needs the
distribution of output lengths."""
DECODE_COST = 3.0
"""For `growth`: device time of a decoded token relative to a prefilled token. 3.3 and 3.8 in the simulated chats and
long outputs on an RTX 4090; higher with fewer concurrent requests."""
MAX_KEPT = 1 / 8
"""For `growth`: maximum share of the pool that is reserved."""
OUTLOOK = 1 / 4
"""For `growth`: number of decode steps over which releases are predicted, as a multiple of the mean output length."""
FARTHEST_PACE = 3.0
"""For `growth`: maximum factor by which the progress of running requests raises or lowers the reserve."""
NUM_AGES = 256
"""For `growth`: number of classes of requests by output tokens so far ("ages"), for which the chance to finish is
tabulated."""
MAX_SHORTAGES = 1024
"""Maximum number of `Shortage` objects that are cached."""
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)


class Demand(NamedTuple):
    """Numbers of free blocks that an admission takes. A cached block held by another request costs nothing."""

    first: int
    """Blocks for the tokens of this step, including cached free blocks that the request would reuse."""
    full: int
    """Blocks for all known tokens of the request."""
    owed: int
    """Blocks that running requests still need for known tokens (partial prefills)."""
    others_run: bool
    """Whether other requests run. If none runs, a request must start."""
    num_waiting: int = 1
    """Number of requests in the queue, the checked request included, plus the number of running requests that would be
    preempted for it."""


class Reserve(Policy):
    """Base class of the reserves. A reserve is a number of blocks that stay free for one reason."""

    kind = "reserve"
    reason: ClassVar[Reason] = Reason.RESERVE
    """The reported reason of a deferral that only this reserve causes."""
    num_changes = 0
    """A counter that changes whenever `blocks` may return another number for the same request and demand."""

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        """Number of blocks that must be free beyond `demand.first`. If no request runs (`demand.others_run` is False),
        a request that fits the pool must be admitted."""
        raise NotImplementedError


class LetsPass(Protocol):
    """A reserve that lets requests bypass a request that lacks blocks; see `bypass.py`."""

    bound: int
    """Maximum number of requests that bypass one waiting request."""

    def allows_bypass(self, request: Request, num_free: int) -> bool:
        """Whether requests behind `request`, which lacks blocks, may be admitted."""

    def num_open(self, num_free: int) -> int:
        """Number of the `num_free` free blocks that requests behind the head of the queue may take."""

    def open_queue(self) -> None:
        """Called when a step begins to check the queue."""

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        """Number of blocks that are kept for the head of the queue, if `request` is behind the head."""


class Shortage(NamedTuple):
    """The blocks that a deferred request needs for its admission, and the reason while too few are free."""

    required: int
    """Number of free blocks that the admission needs, all reserves included."""
    rungs: Sequence[tuple[int, Reason]]
    """Pairs (number of blocks, reason). The first pair whose number is at most the number of free blocks has the reason
    of the deferral."""
    own: int = 0
    """`required` minus the blocks that are kept for the head of the queue."""
    asked: tuple[int, ...] = ()
    """The blocks of the first chunk, then the blocks of each reserve. They determine the other fields."""

    def deferral(self, num_free: int, blocks_queue: bool = True) -> Deferral:
        """The deferral of the request while `num_free` blocks, fewer than required, are free."""
        for enough, reason in self.rungs:
            if enough <= num_free:
                deferral: Deferral = new_tuple(Deferral, (reason, self.required - num_free, blocks_queue))
                return deferral
        raise AssertionError("`rungs` has no pair with 0 blocks")


class Reserves(Gate):
    """Gate: defers a request unless the blocks of its first chunk and of every reserve are free.

    The reason for a deferral is that of the first reserve without which the request would be admitted. If there is no
    such reserve, it is the reason of the last reserve if the first chunk alone would fit; otherwise it is
    `Reason.BLOCKS`.
    """

    def __init__(self, reserves: Sequence[Any], kv: KVCache, view: SchedulerView) -> None:
        self.policies = tuple(reserves)
        self._num_blocks, self._num_blocks_of_whole = kv.num_blocks_to_start, kv.num_blocks_of_whole
        self._view = view
        plain = (Watermark, FullSequence, DecodeReserve)
        self._adaptive = [reserve for reserve in reserves if type(reserve) not in plain]
        self.are_plain = not self._adaptive
        """Whether no reserve learns, and no reserve lets requests bypass others."""
        passing = [reserve for reserve in reserves if hasattr(reserve, "allows_bypass")]
        self.bypass: LetsPass | None = passing[0] if passing else None
        """The reserve that lets requests bypass a request that lacks blocks; None: such a request blocks the queue."""
        counting = [reserve for reserve in reserves if type(reserve) is FullSequence and reserve.counts_owed]
        self.counts_owed: FullSequence | None = counting[0] if counting else None
        """The reserve that counts the blocks that partial prefills still need; None: no reserve does."""
        self.counts_waiting = any(type(reserve) is GrowthReserve for reserve in reserves)
        """Whether the blocks of a reserve depend on the number of waiting requests, if `are_steady`."""
        same = sum(type(reserve) in RESERVES.values() for reserve in reserves)
        self.are_steady = same + len(passing) == len(reserves) and len(counting) < 2 and len(passing) < 2
        """Whether, while `num_changes` stays the same, the blocks of every reserve depend on the request and the demand
        alone, and do not fall when more requests wait."""
        self.shortage: Shortage | None = None
        """The shortage of the request that was checked last; None: this request lacked no block."""
        self._shortages: dict[tuple[int, ...], Shortage] = {}  # by `asked`, as many requests have equal shortages

    @property
    def num_changes(self) -> tuple[int, ...]:
        """The `num_changes` of adaptive reserves, which change whenever a reserve may need another number of blocks."""
        return tuple([reserve.num_changes for reserve in self._adaptive]) if self._adaptive else ()

    def guaranteed_steps(self, num_steps: int) -> int:
        for reserve in self._adaptive:
            num_steps = min(num_steps, reserve.guaranteed_steps(num_steps))
        return num_steps

    def restore(self, shortage: Shortage | None) -> None:
        """Restore the shortage of an earlier check, after a check that was only a query."""
        self.shortage = shortage

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        key, num_free = self._requested_blocks(request, start + want, view), view.num_free_blocks
        required = sum(key)
        if required <= num_free:
            self.shortage = None
            return want
        shortage = self._shortages.get(key)
        if shortage is None:
            if len(self._shortages) >= MAX_SHORTAGES:
                self._shortages.clear()
            shortage = self._shortages[key] = self._make_shortage(required, key)
        self.shortage = shortage
        return self.deferral(request, shortage, num_free)

    def has_enough_blocks(self, request: Request, end: int, view: View) -> bool:
        """Whether the first `end` tokens of the request fit beside every reserve."""
        return sum(self._requested_blocks(request, end, view)) <= view.num_free_blocks

    def _requested_blocks(self, request: Request, end: int, view: View) -> tuple[int, ...]:
        """Number of blocks for the first `end` tokens of the request, then the number of blocks of each reserve."""
        match, shared = self._view.match, view.num_shared_blocks
        first = self._num_blocks(request, match, end) - shared
        full = self._num_blocks_of_whole(request, match) - shared
        demand = Demand(first, full, view.num_owed_blocks, view.num_running > 0, view.num_waiting)
        return (first, *[each.blocks(request, demand, view) for each in self.policies])

    def _make_shortage(self, required: int, asked: tuple[int, ...]) -> Shortage:
        first, *others = asked
        rungs = [(required - blocks, each.reason) for blocks, each in zip(others, self.policies, strict=True)]
        if self.policies:
            rungs.append((first, self.policies[-1].reason))
        kept = 0 if self.bypass is None else others[self.policies.index(self.bypass)]
        return Shortage(required, (*rungs, (0, Reason.BLOCKS)), required - kept, asked)

    def deferral(self, request: Request, shortage: Shortage, num_free: int) -> Deferral:
        """The deferral of a request that lacks blocks: the reason, and whether other requests may bypass it."""
        return shortage.deferral(num_free, self.bypass is None or not self.bypass.allows_bypass(request, num_free))

    def required_blocks(self, request: Request, demand: Demand) -> int:
        """Number of free blocks that the admission of the request needs, all reserves included."""
        required = demand.first
        for reserve in self.policies:
            required += reserve.blocks(request, demand, self._view)
        return required


class Watermark(Reserve):
    """A share of the pool, at least one block, while requests run (vLLM's `watermark`)."""

    name = "watermark"
    parameters = (Parameter("share", 0.01, 0.0, 0.99, tried=(0.01, 0.02, 0.05, 0.1, 0.2), doc="of the pool"),)
    reason = Reason.WATERMARK

    def __init__(self, share: float) -> None:
        self._share = share
        self._num_blocks = 0

    def attach(self, view: View) -> None:
        self._num_blocks = max(1, int(self._share * view.num_usable_blocks)) if self._share else 0

    def guaranteed_steps(self, num_steps: int) -> int:
        return num_steps

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        return self._num_blocks if demand.others_run else 0


class FullSequence(Reserve):
    """Blocks for the remaining known tokens of the request, and of every partial prefill."""

    name = "full-sequence"
    parameters = (Parameter("counts_owed", True, choices=(True, False), doc="whether partial prefills count"),)
    reason = Reason.FULL_SEQUENCE

    def __init__(self, counts_owed: bool = True) -> None:
        self.counts_owed = counts_owed

    def guaranteed_steps(self, num_steps: int) -> int:
        return num_steps

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        owed = demand.owed if self.counts_owed else 0
        return max(0, demand.full + owed - demand.first)


class DecodeReserve(Reserve):
    """Blocks for the expected output of the request, while others run."""

    name = "decode"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("tokens", 128, 0, MAX_INT, tried=(128, 512), doc="expected output of each request"),
    )
    reason = Reason.DECODE_RESERVE

    def __init__(self, tokens: int) -> None:
        self.num_tokens = tokens

    def guaranteed_steps(self, num_steps: int) -> int:
        return num_steps

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        if not demand.others_run:
            return 0
        state = request._state
        expected = min(self.num_tokens, state.max_tokens, state.token_limit - state.num_tokens)
        return view.num_blocks_for(expected)


class MeanDecodeReserve(DecodeReserve):
    """Blocks for the mean of the latest outputs, rounded up; 0 until a request has finished by itself.

    Requests that the host finished (an abort, a deadline) do not count.
    """

    name = "mean-decode"
    parameters: ClassVar[tuple[Parameter, ...]] = ()

    def __init__(self) -> None:
        super().__init__(0)
        self._reset()

    def attach(self, view: View) -> None:
        self._reset()

    def _reset(self) -> None:
        self.num_tokens = 0
        self._lengths: deque[int] = deque(maxlen=MEAN_OVER)
        self._total = 0
        self.num_changes = 0

    def on_finished(self, request: Request, now: float) -> None:
        state = request._state
        if state.finish_reason not in _OWN_ENDS or state.max_tokens == 0:
            return
        if len(self._lengths) == MEAN_OVER:
            self._total -= self._lengths[0]
        self._lengths.append(state.num_output_tokens)
        self._total += state.num_output_tokens
        before, self.num_tokens = self.num_tokens, -(-self._total // len(self._lengths))
        self.num_changes += self.num_tokens != before


class GrowthReserve(Reserve):
    """Blocks that running requests need until one of them finishes, with a margin that minimizes the expected cost.

    With L tokens in the mean output and blocks of B tokens, running requests together grow by D = L / B blocks from one
    finish to the next, whatever their number: in the long run, as many output tokens are generated as belong to
    finished requests. (With several groups of KV, D is the number of blocks held for prompt and output less the number
    held for the prompt.) Growth beyond the free blocks causes preemptions. Assume that growth is distributed
    exponentially, and that an admission leaves between 0 and S free blocks beyond the reserve, where S is the number of
    blocks of a prompt. A reserve of H blocks then costs

        H / U of the pool of U blocks, so the same share of the work W = prompt + 3 outputs (in prefilled tokens) of
        each request; and
        c exp(-H / D) (1 - exp(-S / D)) D / S    for preemptions, each of which recomputes c tokens

    The sum is lowest at H = D ln(c / W U / S (1 - exp(-S / D))). c is the number of tokens in a mean prompt and half a
    mean output. With a prefix cache running requests take only D blocks of a victim before it resumes, so c is at most
    the number of tokens in D blocks and half a block. (The newsvendor problem, Edgeworth 1888; the rest is
    Pointsman's.)

    The progress of running requests shows whether releases are near. The chance that a request finishes within the next
    quarter of a mean output is learned: of the latest outputs that were longer than the request's output so far, it is
    the share that ended within this number of tokens. D is multiplied by the ratio of predicted growth to predicted
    releases in that time, relative to the same ratio in the long run. This factor is limited to 1/3 to 3. It is
    computed only where requests are admitted, preempted or finish, so that no step costs more.

    On average a preemption delays half of the waiting requests by c, since the queue advances meanwhile. Deferring a
    request delays it by W, the time between two finishes. So if fewer than 2 W / c requests wait, the reserve is
    reduced in proportion to their number.

    Prompts and outputs are those of the latest requests that finished by themselves; until one has finished, the
    reserve is 0. The reserve is at most an eighth of the pool, and 0 if no request runs. So no request waits for the
    reserve for ever, as running requests finish. The full-sequence reserve covers partial prefills.
    """

    name = "growth"
    version = 4
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("scale", 1.0, 0.0, 8.0, tried=(0.5, 1.0, 2.0), doc="multiplies the blocks"),
    )

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale
        self._block_size = self._num_usable = 1
        self._has_cache = False
        self._reset()

    def _reset(self) -> None:
        self._lengths: deque[tuple[int, int]] = deque(maxlen=LEARNED_OVER)  # (prompt, output) of the latest requests
        self._num_prompt = self._num_output = 0
        self._num_prompt_tokens = np.zeros(64, dtype=np.int64)  # prompt tokens of the request in each row
        # Chance to finish by age, see `_tabulate_finish_chances`.
        self._chances: npt.NDArray[np.float64] = np.zeros(NUM_AGES + 1)
        self._ahead = self._width = 1  # in tokens: look-ahead of the chances, and width of an age class
        self._until_tabulated = self._until_counted = 0  # number of finishes; of finishes and preemptions
        self._growing = 0.0  # slots by which running requests grow within `_ahead`
        self._released = 0.0  # slots that running requests are predicted to release
        self._most = 0  # reserved blocks if at least `_enough` requests wait
        self._enough = 1  # number of waiting requests
        self._version = 0

    def attach(self, view: View) -> None:
        self._view = view
        self._block_size, self._num_usable = view.block_size, view.num_usable_blocks
        self._has_cache = view.has_prefix_cache
        self._reset()

    def guaranteed_steps(self, num_steps: int) -> int:
        """All `num_steps`, as no request finishes or joins the queue in these steps."""
        return num_steps

    @property
    def num_changes(self) -> int:  # type: ignore[override]
        """A number that changes with the learned values, and with the number of waiting requests."""
        return self._version * (_MANY + 1) + min(self._view.num_waiting, self._enough)

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        if not demand.others_run:
            return 0
        return self._most * min(demand.num_waiting, self._enough) // self._enough

    def on_admitted(self, event: Admitted) -> None:
        state = event.request._state
        row = state.row
        if row is None:
            return
        while row >= len(self._num_prompt_tokens):
            self._num_prompt_tokens = np.concatenate([self._num_prompt_tokens, np.zeros_like(self._num_prompt_tokens)])
        self._num_prompt_tokens[row] = state.num_prompt_tokens
        if self._num_output:
            age = min(state.num_output_tokens // self._width, NUM_AGES)
            self._add_prediction(np.array([state.num_tokens]), np.array([age]))
            self._update_reserve()

    def on_preempted(self, event: Preempted) -> None:
        if self._num_output:
            self._predict_growth()
            self._update_reserve()

    def on_finished(self, request: Request, now: float) -> None:
        state = request._state
        if state.finish_reason not in _OWN_ENDS or state.max_tokens == 0:
            return
        if len(self._lengths) == LEARNED_OVER:
            prompt, output = self._lengths[0]
            self._num_prompt, self._num_output = self._num_prompt - prompt, self._num_output - output
        self._lengths.append((state.num_prompt_tokens, state.num_output_tokens))
        self._num_prompt += state.num_prompt_tokens
        self._num_output += state.num_output_tokens
        if self._num_output:
            self._until_tabulated -= 1
            if self._until_tabulated < 0:
                self._tabulate_finish_chances(max(1, round(OUTLOOK * self._num_output / len(self._lengths))))
            self._predict_growth()
        self._update_reserve()

    def _update_reserve(self) -> None:
        """Set the reserve from the learned values, and from the progress of running requests."""
        before = (self._most, self._enough)
        self._most, self._enough = self._blocks_to_reserve() if self._num_output else (0, 1)
        self._version += before != (self._most, self._enough)

    def _blocks_to_reserve(self) -> tuple[int, int]:
        """The number of blocks to reserve, and the minimum number of waiting requests for which all of them are
        reserved. At least one of the latest outputs must not be empty."""
        size, pool = self._block_size, self._num_usable
        prompt, output = self._num_prompt / len(self._lengths), self._num_output / len(self._lengths)
        work = prompt + DECODE_COST * output
        lost = prompt + output / 2
        if self._has_cache:
            lost = min(lost, output + size / 2)
        of_prompt, of_both = self._view.num_slots_for(np.array([prompt, prompt + output])).tolist()
        grown = of_both - of_prompt
        enough = min(max(1, int(2 * work / lost)), _MANY)
        if not grown:  # the blocks of a request do not depend on its output
            return 0, enough
        pace = 1.0
        if self._released:
            pace = self._growing * of_both / (grown * self._released)
            pace = min(max(pace, 1 / FARTHEST_PACE), FARTHEST_PACE)
        growth, slack = pace * grown / size, max(of_prompt / size, 1.0)  # in blocks
        saved_to_lost = lost / work * pool / slack * -math.expm1(-slack / growth)  # saved by the first reserved block
        kept = self._scale * growth * math.log(max(saved_to_lost, 1.0))
        return int(min(kept, MAX_KEPT * pool)), enough

    def _predict_growth(self) -> None:
        """Predict the growth and the releases of the running requests. With many running requests, only some calls make
        a new prediction."""
        self._until_counted -= 1
        if self._until_counted >= 0:
            return
        rows, known = self._view.rows, self._view.num_tokens
        self._until_counted = len(rows) // 64
        ages = (known - self._num_prompt_tokens[rows]) // self._width
        self._growing = self._released = 0.0
        self._add_prediction(known, np.minimum(ages, NUM_AGES))

    def _add_prediction(self, known: npt.NDArray[np.int64], ages: npt.NDArray[np.int64]) -> None:
        """Add the growth and the releases of requests with `known` tokens and `ages` (output tokens in units of
        `_width`)."""
        slots, tokens = self._view.num_slots_for, known.astype(np.float64)
        self._growing += float((slots(tokens + self._ahead) - slots(tokens)).sum())
        self._released += float(slots(tokens + self._ahead / 2) @ self._chances[ages])

    def _tabulate_finish_chances(self, ahead: int) -> None:
        """Tabulate the chance that a request finishes within `ahead` tokens, by its output tokens so far."""
        outputs = np.sort(np.array([output for _, output in self._lengths]))
        self._until_tabulated = len(outputs) // 32
        self._ahead, self._width = ahead, 1 + int(outputs[-1]) // NUM_AGES
        ages = np.arange(NUM_AGES + 1) * self._width
        finished = outputs.searchsorted(ages, side="right")
        finishing = outputs.searchsorted(ages + ahead, side="right") - finished
        self._chances = (finishing + 0.5) / (len(outputs) - finished + 1)


_MANY = 65_535  # number of waiting requests beyond which more change nothing


RESERVES: dict[str, type[Reserve]] = {
    reserve.name: reserve for reserve in (Watermark, FullSequence, DecodeReserve, MeanDecodeReserve, GrowthReserve)
}
"""Reserves of this file, by name."""


def reserves_of(config: SchedulerConfig) -> list[Any]:
    """The reserves of the configuration: first those set by knobs, then those given by name. A deferral reports the
    first reserve without which the request would be admitted. So the reserves set by knobs are in the order of their
    remedies, cheapest first.

    A full-sequence reserve given by name replaces the full-sequence reserve set by the knob: with both, no pool would
    suffice for a long prompt.
    """
    named = [str(getattr(reserve, "name", reserve)).partition(":")[0] for reserve in config.reserves]
    reserves: list[Any] = []
    if config.watermark > 0.0:
        reserves.append(Watermark(config.watermark))
    if config.full_sequence_must_fit and FullSequence.name not in named:
        reserves.append(FullSequence(config.count_owed_blocks))
    if config.decode_reserve == "mean":
        reserves.append(MeanDecodeReserve())
    elif config.decode_reserve:
        reserves.append(DecodeReserve(config.decode_reserve))
    return [*reserves, *config.reserves]
