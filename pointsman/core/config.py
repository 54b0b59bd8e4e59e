"""Configuration: `SchedulerConfig` declares and validates all knobs of the scheduler.

Each field declares its range, its command-line option, and the values that `pointsman tune` tries; `core/knobs.py`
explains these declarations. `python scripts/write_knobs.py` writes the docstring of each field to the field's row in
docs/reference/configuration.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Self
from warnings import warn

from pointsman.core.errors import ConfigError
from pointsman.core.knobs import AtLeast, Knob, Option, PolicyOf, Seconds, ShareOf, Tried, declared_in
from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.core.state.documented import Documented
from pointsman.core.state.interfaces import Eviction, Order, Victim
from pointsman.core.state.layout import FULL, KINDS, KVGroup

MAX_OVERTAKES = 64
_ENCODER = ("encoder_budget", "encoder_cache_size")
_POOL, _STEPS, _ADMISSION = "KV pool and prefix cache", "Steps", "Admission and preemption"
_SPECULATION, _OUTSIDE = "Speculation", "KV outside the pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(metaclass=Documented):
    """All knobs of a `Scheduler`. A configuration is immutable, and validated as a whole when it is created.

    Raises:
        ConfigError: a value is out of range, or the other knobs leave a knob without effect.
    """

    num_blocks: Annotated[int, AtLeast(1), Option(_POOL, "KV blocks in the pool")]
    """Number of KV blocks in the pool, with ids from 0 to `num_blocks` - 1. `--kv-cache-bytes` sets the size of the
    pool in bytes instead."""
    block_size: Annotated[int, AtLeast(1), Option(_POOL, "Tokens per KV block")] = 16
    """Tokens per KV block. With smaller blocks, requests waste less memory and share shorter prefixes. Larger blocks
    are faster to address."""
    max_model_len: Annotated[int, AtLeast(1), Option(_POOL, "Maximum tokens of a sequence, prompt and output")]
    """Maximum length of a sequence, prompt and output together, in tokens. Lower it to bound the blocks that one
    request may take."""
    num_reserved_blocks: Annotated[int, AtLeast(0)] = 0
    """Number of block ids, from 0 on, that are never allocated (vLLM's null block, a trash block)."""
    kv_groups: tuple[KVGroup, ...] = ()
    """Groups of layers, each with its own block table; all groups share one pool of blocks of `block_size` tokens:
    `KVGroup("full")`, `KVGroup("window", 1024)`, `KVGroup("chunk", 8192)`. Blocks behind a request's window return to
    the pool while the request runs. (): one group of full attention."""
    enable_prefix_caching: Annotated[
        bool, Option(_POOL, "Whether equal prefixes share KV blocks", default="enabled")
    ] = True
    """Whether full blocks are kept after use, to be reused for equal content. Turn this off only where no two prompts
    share a prefix, or for measurements."""
    share_within_step: bool = True
    """Whether a request may read blocks that another request writes in the same step. The host must then write a
    layer's KV for all rows before any row attends."""

    max_num_seqs: Annotated[
        int,
        AtLeast(1),
        Option(_STEPS, "Maximum number of requests that run at once"),
        Tried(
            (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
            rank=2,
            first=(32, 128, 512),
        ),
    ] = 256
    """Maximum number of requests in a step (sequence slots). Hosts size their buffers for this number. Raise it when
    requests wait with the reason `sequence_limit` and the pool has free blocks. Lower it when running requests are
    preempted."""
    max_num_active_seqs: Annotated[
        int | None,
        AtLeast(1),
        Option(_STEPS, "Lower maximum of requests that run at once", default="--max-num-seqs"),
    ] = None
    """Maximum number of requests that run (hold blocks) at once; None: `max_num_seqs`. It may exceed `max_num_seqs`
    only under `batching` "prefill-first". It is the only limit that can change while requests run
    (`Scheduler.set_max_num_active_seqs`)."""
    max_num_batched_tokens: Annotated[
        int,
        AtLeast(1),
        Option(_STEPS, "Token budget of a step"),
        Tried(
            (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
            rank=1,
            first=(512, 1024, 2048, 8192),
        ),
    ] = 8192
    """Token budget: maximum number of tokens that one step computes; at least `max_num_seqs`. Raise it for throughput.
    Lower it to even out gaps between tokens that are below the target of `--token-limit`, which does not act on
    them."""
    enable_chunked_prefill: Annotated[
        bool, Option(_STEPS, "Whether a prompt may be computed over several steps", default="enabled")
    ] = True
    """Whether a prompt may be computed over several steps. If off, a prompt starts only if all its uncached tokens fit
    into one step, and a prompt longer than the budget is refused. A resumed request may always be computed in
    chunks."""
    long_prefill_token_threshold: Annotated[
        int,
        AtLeast(0),
        Option(_STEPS, "Maximum prompt tokens of one request in a step", default="0: no limit"),
        Tried((256, 512, 1024, 2048, 4096, 0), rank=3),
    ] = 0
    """Maximum number of tokens of one request in a step, so that a long prompt leaves budget for others; 0: no limit.
    While no other request is queued or running, a request has the whole budget. Set a threshold when single long
    prompts fill whole steps while other requests wait."""
    long_prefill_token_threshold_adaptive: Annotated[
        bool, Option(_STEPS, "Whether the threshold rises to a fair share of the budget, if larger")
    ] = False
    """Whether `long_prefill_token_threshold` rises to a fair share of the budget, if that is larger:
    `max_num_batched_tokens` divided by the number of queued and running requests. A long prompt then slows down only
    while other requests need the budget."""
    max_num_partial_prefills: Annotated[
        int | None,
        AtLeast(1),
        Option(_STEPS, "Maximum number of partial prefills at once", default="no limit"),
        Tried((1, 2, 4, None), rank=4),
    ] = None
    """Maximum number of partial prefills, that is, of running requests whose prompt is only partly computed; None: no
    cap. A waiting request that would exceed the cap is skipped. Until it starts, at most `max_overtakes` (64) shorter
    requests may start before it, if their whole prompt fits into the step. If the cap is above 1 and
    `long_prefill_token_threshold` is not set, that threshold is 4 % of `max_model_len`."""
    max_long_partial_prefills: Annotated[
        int | None,
        AtLeast(1),
        Option(_STEPS, "Maximum number of partial prefills longer than the threshold", default="no limit"),
    ] = None
    """Maximum number of partial prefills with more tokens than `long_prefill_token_threshold`, so that long prompts
    leave the remaining partial prefills to shorter prompts. None: no such cap."""
    prefill_interval: Annotated[
        int | Literal["host"],
        AtLeast(1, of="steps"),
        Option(
            _STEPS,
            "Steps from a step that computes prompts to the next one, while requests decode",
            metavar="STEPS",
        ),
    ] = 1
    """Number of steps from a step that computes prompts to the next one, while requests decode and admissions keep up
    with arrivals (vLLM's `prefill_schedule_interval`); 1: prompts are computed in any step. Larger numbers give longer
    stretches of even gaps between tokens, and a longer TTFT. "host": the host decides
    (`Scheduler.hold_prefills`), for engines that align their steps with each other."""
    max_steps_in_flight: Annotated[
        int,
        AtLeast(1),
        Option(_STEPS, "Steps in flight; 2: the next step is scheduled while one executes"),
    ] = 1
    """Maximum number of steps in flight: outputs of `schedule` without their `update`; 1: steps are synchronous. With 2
    or more, the host schedules the next step while it still executes the step before it (vLLM's `async_scheduling`).
    Try 2 where steps are short and there is a second core: `docs/guides/steps_in_flight.md`."""
    batching: Annotated[
        Literal["mixed", "prefill-first", "static"],
        Option(_STEPS, "mixed (continuous), or static (for comparison)"),
    ] = "mixed"
    """"mixed": requests join and leave the batch at every step. "prefill-first": a step computes only prompts, partial
    prefills before new prompts; a step without prompts decodes one token for each request. "static": requests are
    admitted only when no request runs (for comparison)."""

    order: Annotated[
        str | Order,
        PolicyOf("order"),
        Option(_ADMISSION, "Which waiting request is next: fcfs, priority, or another that pointsman policies lists"),
        Tried(rank=10),
    ] = "fcfs"
    """Which request is admitted next: a policy name, optionally with parameters ("name:key=value,key=value"), or an
    object with the `Order` protocol; see `docs/reference/policies.md`. "priority": the smallest `priority` first.
    "fcfs-front" and "priority-by-arrival" queue preempted requests as other systems do, see
    `docs/reference/presets.md`. A server refuses requests with a priority if no policy reads priorities."""
    victim: Annotated[
        str | Victim | None,
        PolicyOf("victim"),
        Option(
            _ADMISSION,
            "Which request is preempted for memory: latest, lowest-priority or another",
            default="depends on --order",
        ),
        Tried(rank=9, is_for_short_pool=True),
    ] = None
    """Which request is preempted when blocks run out: a policy name, an object with the `Victim` protocol, or None:
    "lowest-priority" under the orders "priority" and "priority-by-arrival", otherwise "latest"."""
    eviction: Annotated[
        str | Eviction,
        PolicyOf("eviction"),
        Option(_ADMISSION, "Which cached prefix is evicted first: lru, retention, reuse or another"),
        Tried(rank=12),
    ] = "lru"
    """Which cached prefix is evicted first: a policy name, optionally with parameters, or an object with the `Eviction`
    protocol. All except "lru" need the prefix cache. Use "reuse" where many prompts share prefixes, and "retention"
    where clients say how long to keep theirs: `docs/reference/policies.md#eviction` has the bounds."""
    max_policy_failures: Annotated[
        int,
        AtLeast(1),
        Option(
            _ADMISSION,
            "Failed steps after which the default replaces a policy of another package",
            is_simulated=False,
        ),
    ] = 3
    """Number of failed steps after which the default policy of its kind replaces a policy of another package. After 100
    steps without a failure the count starts again. A step in which a policy fails is scheduled again:
    `docs/guides/write_a_policy.md#if-your-policy-fails`."""
    preemption_mode: Annotated[
        Literal["recompute", "swap", "cheaper"],
        Option(
            _ADMISSION,
            "How a preempted request gets evicted KV back: recompute, swap (from host memory), or cheaper (the faster "
            "for each request). swap and cheaper need --kv-offload-bytes",
        ),
    ] = "recompute"
    """What happens to the KV of a preempted request if the pool evicts it before the request resumes. "recompute": the
    KV is lost, unless the connector saves all evicted blocks. "swap": the KV is copied to host memory, and back when
    the request resumes. "cheaper": "recompute" or "swap", whichever is faster for each victim, judged by past step
    times and copies. "swap" and "cheaper" need the prefix cache, and a connector with host memory
    (`--kv-offload-bytes`): `docs/reference/policies.md#recompute-or-swap`."""
    reserves: Annotated[
        tuple[Any, ...],
        PolicyOf("reserve"),
        Option(
            _ADMISSION,
            "A further reserve of blocks that admissions leave free, such as bypass:bound=16; may be repeated",
            flag="--reserve",
        ),
        Tried(rank=8, is_for_short_pool=True),
    ] = ()
    """Further reserves that an admission leaves free, in addition to `full_sequence_must_fit`, `watermark` and
    `decode_reserve`: policy names, or `Reserve` objects. The reserves add up. `docs/reference/policies.md#reserves`
    says when to use which."""
    token_limits: Annotated[
        tuple[Any, ...],
        PolicyOf("limit"),
        Option(
            _ADMISSION,
            "A further limit on the tokens of a request or a step, such as prefill-threshold:tokens=512; may be "
            "repeated",
            flag="--token-limit",
        ),
        Tried(rank=11),
    ] = ()
    """Further limits on the tokens of a request or of a step: policy names, or `Limit` objects.
    `docs/reference/policies.md#limits` describes each built-in limit."""
    displace: Annotated[
        bool | None,
        Option(
            _ADMISSION, "Whether waiting requests preempt less urgent running ones", default="only under order priority"
        ),
    ] = None
    """Whether a waiting request preempts strictly less urgent running requests (priority preemption). None: only under
    the order "priority". Under an order without urgency, True is an error."""
    full_sequence_must_fit: Annotated[
        bool,
        Option(
            _ADMISSION,
            "Whether an admission needs blocks for the whole prompt, not only its first chunk",
            default="yes",
        ),
        Tried((True, False), is_ordered=False, is_for_short_pool=True, rank=7),
    ] = True
    """Whether a request is admitted only if blocks for all its known tokens are free, in addition to the blocks that
    partial prefills still need. If off, blocks for its first chunk suffice, so more requests are admitted, and more are
    preempted."""
    watermark: Annotated[
        float,
        ShareOf("the pool"),
        Option(_ADMISSION, "Share of the pool that an admission leaves free"),
        Tried((0.0, 0.01, 0.02, 0.05, 0.1, 0.2), is_for_short_pool=True, rank=5),
    ] = 0.0
    """Share of the pool that an admission must leave free while other requests run, rounded down to whole blocks, but
    at least one block. 0: no watermark. To reduce preemptions, try 0.01 to 0.1."""
    decode_reserve: Annotated[
        int | Literal["mean"],
        AtLeast(0, of="tokens"),
        Option(
            _ADMISSION,
            "Output tokens for which an admission needs free blocks: a number, or mean (of the last 128 requests)",
            metavar="TOKENS",
        ),
        Tried((0, 128, 512, "mean"), is_ordered=False, is_for_short_pool=True, rank=6),
    ] = 0
    """Expected output of a request, in tokens. While others run, a request is admitted only if the remaining free
    blocks hold this output (cut to the request's limits). "mean": the mean output of the last 128 requests that a stop
    condition ended. 0: no reserve. To reduce preemptions, raise it where outputs are long and of similar length."""

    num_draft_tokens: Annotated[
        int,
        AtLeast(0),
        Option(
            _SPECULATION,
            "Maximum drafts per request and step, by prompt lookup",
            default="0: no speculation",
            is_simulated=False,
        ),
    ] = 0
    """Speculation: maximum number of draft tokens that a step verifies for one request, in addition to its next token;
    0: no drafts. If the budget is too small for all drafts, every row verifies fewer drafts. Try 4 to 7 where outputs
    quote their prompts: `docs/guides/speculate.md`."""
    draft_table: Annotated[
        tuple[tuple[int, int], ...],
        Option(
            _SPECULATION,
            "Fewer drafts as more requests run: 16:2,64:0 is 2 drafts from 16 requests on, and 0 from 64 on",
            metavar="RUNNING:DRAFTS,...",
        ),
    ] = ()
    """Pairs (running requests, drafts), in ascending order: while at least that number of requests run, each request
    has at most that number of drafts. Verification is nearly free in small steps, and costs its full compute in full
    steps. The option takes `16:2,64:0` for ((16, 2), (64, 0))."""
    pad_first_decodes: bool = False
    """Whether a request whose first step computes a single token also verifies `num_draft_tokens` placeholders
    (`UNSAMPLED`, which no host accepts), unless that step continues a prefill, or a limit on drafts cuts them. All rows
    of the step then have equally many tokens, as graphs captured for uniform decodes require."""

    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"],
        Option(_OUTSIDE, "When KV cannot be loaded: recompute it, or fail the request", is_simulated=False),
    ] = "recompute"
    """With a connector (`--kv-store`): what happens to a request whose KV was not loaded completely within
    `kv_load_timeout`. "recompute": the missing tokens are computed. "fail": the request finishes with an error."""
    kv_load_timeout: Annotated[
        float | None,
        Seconds(),
        Option(
            _OUTSIDE,
            "Seconds after which a load from the KV store fails",
            default="no limit",
            is_simulated=False,
        ),
    ] = None
    """With a connector (`--kv-store`): seconds after which an asynchronous load counts as failed. The blocks of the
    load stay held until the host reports that the device no longer accesses them. None: no limit."""

    max_loras: Annotated[int, AtLeast(0)] = 0
    """Maximum number of different adapters (LoRA) that run at the same time. A request whose adapter has no slot is
    skipped: requests behind it may be admitted. 0: a request with an adapter is refused."""
    encoder_budget: Annotated[int, AtLeast(0)] = 0
    """Maximum number of embeddings of encoder inputs (images, audio) that one step computes. 0: a request with encoder
    inputs is refused."""
    encoder_cache_size: Annotated[int, AtLeast(0)] = 0
    """Maximum number of cached embeddings: the embeddings that running requests need, and further ones for reuse."""
    keep_embeddings: bool = True
    """Whether embeddings stay cached for reuse after the rows that need them have computed their placeholders. False:
    the embeddings are freed then, and recomputed for a request that restarts. False is for models that keep KV of the
    embeddings (cross-attention), which is lost with the request's row."""
    split_encoder_inputs: bool | Literal["begun"] = True
    """Whether a chunk of a prompt may end within the placeholders of an encoder input. False: the chunk ends before
    these placeholders, and the next chunk has all of them, so a request waits for a step with enough budget for its
    next input. "begun": the next chunk begins with these placeholders and may end within them. False acts as "begun"
    where no chunk can be as long as the input, and where `token_limits` decide the length of chunks."""
    max_overtakes: Annotated[int, AtLeast(0)] = MAX_OVERTAKES
    """Maximum number of requests that bypass a skipped request. After that, a skipped request that lacks an adapter
    slot claims the slot that has been held longest: no request behind it starts with that slot's adapter. Behind a
    skipped request that lacks embeddings, no request is admitted."""

    enable_kv_cache_events: bool = False
    """Whether the scheduler logs the blocks that enter and leave the prefix cache. The host must then call
    `Scheduler.take_kv_events`, or the events accumulate."""
    count_common_prefix: bool = False
    """Whether each output reports the number of leading blocks that all its rows share (`num_common_prefix_blocks`)."""
    log_request_events: Annotated[
        bool,
        Option(
            "Outputs and observation",
            "Whether each request keeps a log of its events with times",
            is_simulated=False,
        ),
    ] = False
    """Whether each request keeps a log of its events with their times: queued, scheduled, preempted, resumed, parked,
    first token, finished. `Request.events` returns the log, and so does `GET /v1/requests/ID` of a server."""

    # The remaining fields are for presets that reproduce other systems.
    first_chunk_only: bool = False
    """Whether only the first request of a step may be cut to the budget; all tokens of any other request must fit the
    remaining budget."""
    admission_charge: Literal["uncached", "whole-fits", "whole"] = "uncached"
    """Which tokens of a request must fit the budget, and which tokens are charged to the budget. "uncached": the tokens
    that the request computes must fit, and are charged. "whole-fits": all known tokens must fit, and so must their
    blocks, as if uncached; the computed tokens are charged. "whole": as "whole-fits", but all known tokens are
    charged."""
    count_owed_blocks: bool = True
    """Whether `full_sequence_must_fit` counts the blocks that partial prefills still need."""
    admit_after_preemption: bool = False
    """Under "mixed": whether a step that preempted for memory still admits requests, even a victim, into the blocks
    that the victims released."""
    shortage: Literal["replan", "in-order", "look-ahead"] = "replan"
    """How blocks are distributed among the rows of a step when they run out. "replan": the step is recomputed without
    the victim. "in-order": rows get blocks one after the other. "look-ahead": as "in-order", and the first row that the
    step's limits exclude also asks for its block."""
    own_preemption_ends_step: bool = True
    """Whether, where rows get blocks one after the other, a row that is itself preempted ends the step for all rows
    behind it."""
    encoder_blocks_queue: bool = False
    """Whether a waiting request that lacks embeddings blocks the queue, regardless of `max_overtakes`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_table", _checked_draft_table(self.draft_table))  # JSON has lists
        object.__setattr__(self, "kv_groups", _checked_kv_groups(self.kv_groups))
        for name, knob in scheduler_knobs().items():
            if knob.is_list_of_policies:
                object.__setattr__(self, name, _checked_policies(name, getattr(self, name)))
        self._check_ranges()
        self._check_combinations()

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The configuration of the preset `name`, a key of `PRESETS` or `SYSTEMS`; `overrides` replace the preset's
        values.

        Raises:
            ConfigError: no preset has that name.
        """
        presets = PRESETS | SYSTEMS
        if name not in presets:
            raise ConfigError(f"no preset is called {name!r}; choose one of {', '.join(presets)}")
        values = {**presets[name], **overrides}
        if values.get("enable_prefix_caching") is False and "share_within_step" not in overrides:
            values.pop("share_within_step", None)  # set by the preset; it has no effect without the cache
        if values.get("full_sequence_must_fit") is False and "count_owed_blocks" not in overrides:
            values.pop("count_owed_blocks", None)
        return cls(**values)

    def replace(self, **overrides: Any) -> Self:
        """A copy of the configuration with the values of the knobs in `overrides`; the copy is validated as a whole."""
        return replace(self, **overrides)

    @property
    def prefill_threshold(self) -> int:
        """`long_prefill_token_threshold`, or its default if several partial prefills are allowed; 0: no threshold."""
        if self.long_prefill_token_threshold or (self.max_num_partial_prefills or 1) == 1:
            return self.long_prefill_token_threshold
        return max(1, int(self.max_model_len * 0.04))

    @property
    def num_usable_blocks(self) -> int:
        """Number of blocks that requests can hold: the pool without the reserved ids."""
        return self.num_blocks - self.num_reserved_blocks

    @property
    def has_kv_groups(self) -> bool:
        """Whether there is any group of KV besides one group of full attention."""
        return self.kv_groups not in ((), (FULL,))

    @property
    def num_sequence_slots(self) -> int:
        """Number of sequence slots: maximum number of requests that hold blocks at the same time."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def num_seats(self) -> int:
        """The old name of `num_sequence_slots`."""
        warn("`num_seats` is now called `num_sequence_slots`", DeprecationWarning, stacklevel=2)
        return self.num_sequence_slots

    @property
    def num_usable_tokens(self) -> int:
        """Length in tokens of the longest sequence whose KV the usable blocks hold; with `kv_groups`, at most
        `max_model_len`."""
        if not self.has_kv_groups:
            return self.num_usable_blocks * self.block_size
        return bisect_right(range(1, self.max_model_len + 1), self.num_usable_blocks, key=self.max_blocks)

    @property
    def num_full_length(self) -> float:
        """Number of requests of length `max_model_len` that the usable blocks hold at the same time, if all requests
        but one decode; the remaining request may compute all tokens of a step."""
        usable, most = self.num_usable_blocks, self.max_blocks(self.max_model_len)
        return usable / most if usable <= most else 1 + (usable - most) / self.decode_blocks(self.max_model_len)

    @property
    def num_full_length_tokens(self) -> int:
        """Number of tokens that the usable blocks hold; with `kv_groups`, in requests of length `max_model_len`."""
        if not self.has_kv_groups:
            return self.num_usable_blocks * self.block_size
        return int(self.num_full_length * self.max_model_len)

    @property
    def max_tokens_in_flight(self) -> int:
        """Maximum number of tokens that the steps in flight compute together."""
        return self.max_num_batched_tokens * self.max_steps_in_flight

    def max_blocks(self, num_tokens: int) -> int:
        """Maximum number of blocks that a request holds at any time until it has computed its first `num_tokens`
        tokens."""
        groups = self.kv_groups or (FULL,)
        return sum(group.max_blocks(num_tokens, self.max_tokens_in_flight, self.block_size) for group in groups)

    def most_blocks(self, num_tokens: int) -> int:
        """The old name of `max_blocks`."""
        warn("`most_blocks` is now called `max_blocks`", DeprecationWarning, stacklevel=2)
        return self.max_blocks(num_tokens)

    def decode_blocks(self, num_tokens: int) -> int:
        """Maximum number of blocks that a decoding request with `num_tokens` tokens holds."""
        most = self.max_steps_in_flight * (1 + self.num_draft_tokens)
        groups = self.kv_groups or (FULL,)
        return sum(group.max_blocks(num_tokens, most, self.block_size) for group in groups)

    def max_drafts(self, num_running: int) -> int:
        """Maximum number of draft tokens of a request in a step with `num_running` running requests."""
        most = self.num_draft_tokens
        for running, drafts in self.draft_table:
            if num_running < running:
                break
            most = drafts
        return most

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values; a policy object is represented by its name."""
        return {name: _json_value(knob, getattr(self, name)) for name, knob in scheduler_knobs().items()}

    def _check_ranges(self) -> None:
        for name, knob in scheduler_knobs().items():
            value = getattr(self, name)
            knob.check(value)
            if knob.policy is not None and value is not None:
                for policy in value if knob.is_list_of_policies else (value,):
                    knob.policy.check(policy)

    def _check_combinations(self) -> None:
        if self.num_usable_blocks < 1:
            raise ConfigError(
                f"num_reserved_blocks is {self.num_reserved_blocks} of num_blocks {self.num_blocks}: no block is left "
                "for requests; raise num_blocks"
            )
        if self.max_num_batched_tokens < self.max_num_seqs and self.batching != "prefill-first":
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}: "
                "not every running request could decode in a step; raise max_num_batched_tokens or lower max_num_seqs"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold} but enable_chunked_prefill is "
                "off, so it would have no effect; set it to 0 or turn enable_chunked_prefill on"
            )
        if self.long_prefill_token_threshold >= self.max_num_batched_tokens:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold}, not below "
                f"max_num_batched_tokens {self.max_num_batched_tokens}, so it would have no effect; lower it, or set "
                "it to 0 for no threshold"
            )
        self._check_partial_prefills()
        if self.long_prefill_token_threshold_adaptive and not self.prefill_threshold:
            raise ConfigError(
                "long_prefill_token_threshold_adaptive is on, but long_prefill_token_threshold is 0, so there is no "
                "threshold to adapt; set long_prefill_token_threshold, or turn the adaptive knob off"
            )
        if self.enable_kv_cache_events and not self.enable_prefix_caching:
            raise ConfigError(
                "enable_kv_cache_events is on, but enable_prefix_caching is off, so no block is cached; turn "
                "enable_prefix_caching on, or enable_kv_cache_events off"
            )
        if self.eviction != "lru" and not self.enable_prefix_caching:
            raise ConfigError(
                f"eviction is {_policy_name(self.eviction)!r}, but enable_prefix_caching is off, so no block is "
                'cached; turn enable_prefix_caching on, or leave eviction at its default, "lru"'
            )
        if self.count_common_prefix and not self.enable_prefix_caching:
            raise ConfigError(
                "count_common_prefix is on, but enable_prefix_caching is off, so requests share no blocks; turn "
                "enable_prefix_caching on, or count_common_prefix off"
            )
        if self.preemption_mode != "recompute" and not self.enable_prefix_caching:
            raise ConfigError(
                f'preemption_mode is "{self.preemption_mode}", but enable_prefix_caching is off, and swapped blocks '
                "are loaded only through the prefix cache; turn enable_prefix_caching on, or set preemption_mode to "
                '"recompute"'
            )
        if not self.share_within_step and not self.enable_prefix_caching:
            raise ConfigError("share_within_step=False has no effect without prefix caching; leave it at its default")
        if self.displace and self.batching != "mixed":
            raise ConfigError(
                f'displace=True has no effect with batching "{self.batching}"; use batching="mixed" or leave displace '
                "unset"
            )
        if self.displace and self.order in ("fcfs", "fcfs-front", "priority-by-arrival"):
            raise ConfigError(
                f'displace=True has no effect under order "{self.order}"; use order="priority" or leave displace unset'
            )
        capped = self.max_num_partial_prefills is not None or self.max_long_partial_prefills is not None
        if self.max_overtakes != MAX_OVERTAKES and not (self.max_loras or self.encoder_budget or capped):
            raise ConfigError(
                f"max_overtakes is {self.max_overtakes}, but has no effect without adapters, encoder inputs or a cap "
                "on partial prefills; set max_loras, encoder_budget or max_num_partial_prefills, or leave "
                "max_overtakes at its default"
            )
        self._check_encoder()
        self._check_speculation()
        self._check_prefill_first()

    def _check_encoder(self) -> None:
        for name in ("split_encoder_inputs", "keep_embeddings"):
            value = getattr(self, name)
            if value is not True and not self.encoder_budget:
                raise ConfigError(
                    f"{name}={value!r} has no effect without encoder inputs; set encoder_budget, or leave {name} at "
                    "its default"
                )
        for name, other in (_ENCODER, _ENCODER[::-1]):
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and {other} is 0, so no encoder input is accepted; set "
                    f"{other} too"
                )
        if self.encoder_budget and self.batching == "prefill-first":
            raise ConfigError(
                f'encoder_budget is {self.encoder_budget}, but batching "prefill-first" supports no encoder inputs; '
                'set encoder_budget to 0, or batching to "mixed" or "static"'
            )

    def _check_speculation(self) -> None:
        if self.draft_table and not self.num_draft_tokens:
            raise ConfigError(
                f"draft_table is {self.draft_table}, but num_draft_tokens is 0, so there are no drafts; raise "
                "num_draft_tokens, or leave draft_table empty"
            )
        if self.pad_first_decodes and (not self.num_draft_tokens or self.draft_table or self.batching != "mixed"):
            raise ConfigError(
                "pad_first_decodes=True needs num_draft_tokens above 0, an empty draft_table, and batching "
                '"mixed"; change these knobs, or leave pad_first_decodes at its default'
            )
        for running, drafts in self.draft_table:
            if drafts > self.num_draft_tokens:
                raise ConfigError(
                    f"draft_table allows {drafts} drafts with {running} or more running requests, and num_draft_tokens "
                    f"only {self.num_draft_tokens}; raise num_draft_tokens, or lower this entry of draft_table"
                )

    def _check_partial_prefills(self) -> None:
        cap, long_cap = self.max_num_partial_prefills, self.max_long_partial_prefills
        if (cap is not None or long_cap is not None) and not self.enable_chunked_prefill:
            raise ConfigError(
                f"max_num_partial_prefills is {cap} and max_long_partial_prefills is {long_cap}, but without "
                "enable_chunked_prefill no prefill is partial; leave both unset, or turn enable_chunked_prefill on"
            )
        if long_cap is not None and not self.prefill_threshold:
            raise ConfigError(
                f"max_long_partial_prefills is {long_cap}, but long_prefill_token_threshold is 0, so no prompt counts "
                "as long; set long_prefill_token_threshold"
            )
        if cap is not None and long_cap is not None and long_cap >= cap:
            raise ConfigError(
                f"max_long_partial_prefills is {long_cap}, not below max_num_partial_prefills {cap}, so it would have "
                "no effect; lower it, or leave it unset"
            )

    def _check_prefill_first(self) -> None:
        if self.batching == "prefill-first" and self.shortage == "replan":
            raise ConfigError(
                'shortage is "replan", but batching "prefill-first" allocates blocks row by row when they run out; set '
                'shortage to "in-order" or "look-ahead"'
            )
        if self.prefill_interval != 1 and self.batching != "mixed":
            raise ConfigError(
                f'prefill_interval is {self.prefill_interval}, and works with batching "mixed" alone; set it to 1, or '
                'batching to "mixed"'
            )
        if self.batching != "prefill-first" and self.num_sequence_slots > self.max_num_seqs:
            raise ConfigError(
                f"max_num_active_seqs is {self.max_num_active_seqs}, more than max_num_seqs {self.max_num_seqs}; lower "
                'it, or use batching="prefill-first", where not every active request is in every step'
            )
        if self.admit_after_preemption and self.batching != "mixed":
            raise ConfigError(
                f'admit_after_preemption=True works with batching "mixed" and not "{self.batching}", where a prompt '
                "could be preempted and readmitted endlessly while no request decodes; leave it at its default"
            )
        if not self.count_owed_blocks and not self.full_sequence_must_fit:
            raise ConfigError(
                "count_owed_blocks=False has no effect without full_sequence_must_fit; leave it at its default"
            )


@cache
def scheduler_knobs() -> Mapping[str, Knob]:
    """The declarations of the fields of `SchedulerConfig`, keyed by field name, in the order of the fields."""
    return declared_in(SchedulerConfig)


def _json_value(knob: Knob, value: Any) -> Any:
    """A knob's value for JSON."""
    if knob.is_list_of_policies:
        return [_policy_name(policy) for policy in value]
    return _policy_name(value) if knob.policy is not None else value


def _policy_name(policy: Any) -> Any:
    """A policy's name for JSON. The parameters of an object are unknown, so the name alone would not recreate the
    object: if the policy takes parameters, the name gets a suffix."""
    if policy is None or isinstance(policy, str):
        return policy
    return f"{policy.name} (object)" if getattr(policy, "parameters", ()) else policy.name


def _checked_policies(name: str, given: object) -> tuple[Any, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, (tuple, list)):
        raise ConfigError(
            f'{name} is {given!r}; give a list of policy names or policy objects, such as ["watermark:share=0.02"]'
        )
    return tuple(given)


def _checked_kv_groups(values: object) -> tuple[KVGroup, ...]:
    try:
        if isinstance(values, str):
            raise TypeError
        groups = tuple(KVGroup(*group) for group in values)  # type: ignore[attr-defined]
    except TypeError:
        raise ConfigError(
            f'kv_groups is {values!r}; give pairs of a kind and a size, such as (("full", 0), ("window", 1024))'
        ) from None
    for group in groups:
        if group.kind not in KINDS:
            raise ConfigError(f"a group in kv_groups is of kind {group.kind!r}; choose one of {', '.join(KINDS)}")
        if group.is_full and group.size != 0:
            raise ConfigError(f'a "full" group in kv_groups has size {group.size}; such a group has no size, omit it')
        if not group.is_full:
            AtLeast(1).check(f'the size of a "{group.kind}" group in kv_groups', group.size)
    return groups


def _checked_draft_table(table: object) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((running, drafts) for running, drafts in table)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ConfigError(
            f"draft_table is {table!r}; give pairs (running requests, drafts), such as ((1, 4), (32, 1))"
        ) from None
    least = 1
    for running, drafts in pairs:
        AtLeast(least).check("a number of running requests in draft_table", running)
        AtLeast(0).check("a number of drafts in draft_table", drafts)
        least = running + 1
    return pairs
