"""Which knobs does the scheduler have? One validated dataclass, a docstring under each field, and the presets."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from pointsman.core.errors import ConfigError
from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.core.state.interfaces import Eviction, Order, Victim
from pointsman.core.state.layout import FULL, KINDS, KVGroup
from pointsman.core.state.numbers import MAX_INT

MAX_OVERTAKES = 64
_ENCODER = ("encoder_budget", "encoder_cache_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a `Scheduler` behaves. Immutable, validated as a whole when it is built.

    Raises:
        ConfigError: a value is out of range, or a knob would have no effect as the others are set.
    """

    num_blocks: int
    """KV blocks in the pool, ids 0 to num_blocks - 1."""
    max_model_len: int
    """Longest sequence the model can hold, prompt and output together, in tokens."""
    block_size: int = 16
    """Tokens per KV block."""
    num_reserved_blocks: int = 0
    """Block ids 0 to num_reserved_blocks - 1 are never allocated (vLLM's null block, a trash block)."""
    kv_groups: tuple[KVGroup, ...] = ()
    """Groups of layers with block tables of their own, all of blocks of `block_size` tokens from the one pool:
    `KVGroup("full")`, `KVGroup("window", 1024)`, `KVGroup("chunk", 8192)`. What lies behind a request's window returns
    to the pool while it runs. (): one group of full attention."""

    max_num_seqs: int = 256
    """Maximum number of requests in a step; hosts size their buffers for it."""
    max_num_active_seqs: int | None = None
    """Maximum number of requests that run (hold blocks) at once; None: `max_num_seqs`. At most that, as every running
    request is in every step, except under "prefill-first". The one limit that `Scheduler.set_max_num_active_seqs` can
    change while requests run."""
    max_num_batched_tokens: int = 8192
    """Token budget: maximum number of tokens that one step computes, over all requests."""
    max_steps_in_flight: int = 1
    """Maximum number of outputs of `schedule` without their `update`; 1 is synchronous. With more, the host schedules
    the next step while it still executes one (vLLM's `async_scheduling`)."""

    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps. Off: a prompt starts only if all its uncached
    tokens fit one step, and one longer than the budget is refused. A resumed request may always be chunked."""
    long_prefill_token_threshold: int = 0
    """Maximum number of tokens that one request may advance in a step, so that a long prompt leaves budget for others;
    0: no limit. A request that is the only one, queued or running, has the whole budget."""
    max_num_partial_prefills: int | None = None
    """Maximum number of concurrent partial prefills: prompts computed in part, with more to come. A request that would
    exceed it is skipped, see `max_overtakes`: shorter ones that fit the step may start. None: no cap. With one above 1
    and no `long_prefill_token_threshold`, that is 4 % of `max_model_len`."""
    max_long_partial_prefills: int | None = None
    """Maximum number of these that are longer than `long_prefill_token_threshold`, so that long prompts leave the
    others to shorter ones. None: no such cap."""
    long_prefill_token_threshold_adaptive: bool = False
    """Whether the threshold is at least a fair share of the budget: `max_num_batched_tokens` divided by the number of
    queued and running requests."""

    enable_prefix_caching: bool = True
    """Whether full blocks are kept after use, to be reused for equal content."""
    share_within_step: bool = True
    """Whether a request may read blocks that another one writes in the same step. The host must then write a
    layer's KV for all rows before any row attends."""

    num_draft_tokens: int = 0
    """Speculation: maximum number of draft tokens that a step verifies for one request, beside its own next token; 0:
    none. Where the budget does not hold them for every row, all rows verify fewer."""
    draft_table: tuple[tuple[int, int], ...] = ()
    """Pairs (running requests, drafts), ascending: with at least that number of running requests, at most that number
    of drafts each. Verification is nearly free while steps are small, and costs what it computes once they are full."""

    pad_first_decodes: bool = False
    """Whether a request whose first step computes one token alone verifies `num_draft_tokens` placeholders beside it
    (`UNSAMPLED`, which no host accepts), unless that step continues a prefill, or a limit on drafts cuts them: so that
    all rows of the step have as many tokens, as graphs captured for uniform decodes need."""

    max_policy_failures: int = 3
    """Steps in which a policy of another package may fail, with fewer than 100 others between two of them, before the
    default of its kind takes its place. Each of them is scheduled again."""

    order: str | Order = "fcfs"
    """Which request is admitted next: a name, with parameters if need be ("name:key=value,key=value"), or an object
    with the `Order` protocol; see `docs/policies.md`. "fcfs-front" and "priority-by-arrival" queue preempted requests
    as other systems do, see `docs/presets.md`."""
    victim: str | Victim | None = None
    """Which request is preempted when blocks run out: a name, an object with the `Victim` protocol, or None:
    "lowest-priority" under the orders "priority" and "priority-by-arrival", otherwise "latest"."""
    reserves: tuple[Any, ...] = ()
    """What else an admission leaves free, beside the knobs below: names, or `Reserve` objects. They add up."""
    token_limits: tuple[Any, ...] = ()
    """What else limits the tokens of a request, or of a step: names, or `Limit` objects."""
    eviction: str | Eviction = "lru"
    """Which cached prefix is evicted first: a name, with parameters if need be, or an object with the `Eviction`
    protocol. Others than "lru" need the prefix cache."""
    displace: bool | None = None
    """Under "priority": whether less urgent running requests are preempted for a strictly more urgent waiting
    one. None: yes under "priority". Under an order without urgency, True is an error."""

    max_loras: int = 0
    """Maximum number of different adapters (LoRA) that run at once. A request whose adapter has no slot is skipped:
    those behind it may be admitted. 0: a request with an adapter is refused."""
    encoder_budget: int = 0
    """Maximum number of embeddings of encoder inputs (images, audio) that one step computes. 0: a request with encoder
    inputs is refused."""
    encoder_cache_size: int = 0
    """Embeddings that are kept: those that running requests need, and others for reuse."""
    keep_embeddings: bool = True
    """Whether embeddings stay cached for reuse when the rows that need them have passed their placeholders. False: they
    are freed then, and computed again for a request that starts again; so for models that keep KV of them, which is
    gone with the request's row (cross-attention)."""
    split_encoder_inputs: bool | Literal["begun"] = True
    """Whether a chunk of a prompt may end within the placeholders of an encoder input. False: it ends before them, and
    the next chunk has all of them, so a request waits for a step with room for its next input. "begun": the next chunk
    begins with them and may end within them. That holds for False too where no chunk can be as long as the input, and
    where `token_limits` decide how long chunks are."""
    max_overtakes: int = MAX_OVERTAKES
    """How many requests may bypass a skipped one. Then, if it lacks an adapter slot, it claims that of the adapter that
    has held one longest: no request behind it starts with that adapter. If it lacks embeddings, no request behind it is
    admitted."""

    watermark: float = 0.0
    """Share of the pool, rounded down to blocks and at least one, that an admission must leave free while something
    runs, as headroom for running requests. 0: none."""
    decode_reserve: int | Literal["mean"] = 0
    """Expected output of a request, in tokens: while something runs, admit only if the remaining free blocks hold it
    (or what its limits leave of it). "mean": the mean output of the last 128 requests that finished by themselves. 0:
    none."""
    full_sequence_must_fit: bool = True
    """Admit only if the whole known sequence fits, not just its first chunk, beside what partial prefills are still
    owed."""

    preemption_mode: Literal["recompute", "swap", "cheaper"] = "recompute"
    """What happens to the KV of a preempted request when the pool evicts it before the request resumes. "recompute": it
    is lost, unless the connector saves all that is evicted. "swap": it is copied to host memory, and back when the
    request resumes. "cheaper": for each victim what takes less time, by the step times and the copies so far. The last
    two need the prefix cache, and a connector with host memory (`core/policy/swap.py`)."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """With a connector: what happens to a request whose KV could not all be loaded in time. "recompute": missing tokens
    are computed. "fail": it finishes with an error."""
    kv_load_timeout: float | None = None
    """With a connector: seconds after which an asynchronous load counts as failed. Its blocks stay held until the host
    reports that the device is done with them. None: no limit."""

    batching: Literal["mixed", "prefill-first", "static"] = "mixed"
    """"mixed": requests join and leave at every step. "prefill-first": a step computes prompts, partial prefills and
    then new ones, and only if there are none, one token for each that decodes. "static": admit only when nothing
    runs (for comparison)."""

    enable_kv_cache_events: bool = False
    """Whether the scheduler keeps what enters and leaves the prefix cache, for `Scheduler.take_kv_events`, which the
    host must then call, or the events accumulate."""
    count_common_prefix: bool = False
    """Whether each output counts the blocks that all its rows begin with (`num_common_prefix_blocks`)."""
    log_request_events: bool = False
    """Whether each request keeps a log of its events with their times (`Request.events`)."""

    # The remaining fields are for the presets that reproduce other systems.
    first_chunk_only: bool = False
    """Whether only the first request of a step may be cut to the budget; any other must fit the remaining budget."""
    admission_charge: Literal["uncached", "whole-fits", "whole"] = "uncached"
    """What must fit the budget, and what a request takes from it. "uncached": the tokens it computes. "whole-fits": all
    its known tokens must fit, and so must their blocks, as if nothing were cached; it takes what it computes. "whole":
    the same, and it takes all its known tokens."""
    count_owed_blocks: bool = True
    """Whether `full_sequence_must_fit` counts what partial prefills are still owed."""
    admit_after_preemption: bool = False
    """Under "mixed": whether a step that preempted for memory still admits, into the blocks that the victims released,
    even a victim itself."""
    shortage: Literal["replan", "in-order", "look-ahead"] = "replan"
    """What happens to the other rows when blocks run out. "replan": the step is recomputed without the victim.
    "in-order": rows get blocks one after the other.
    "look-ahead": the same, and the first row behind the step's limits asks for its block too."""
    own_preemption_ends_step: bool = True
    """Where rows get blocks one after the other: whether the rows behind one that is itself preempted wait."""
    encoder_blocks_queue: bool = False
    """Whether no request bypasses a waiting one that lacks embeddings, whatever `max_overtakes` says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_table", _checked_draft_table(self.draft_table))  # JSON has lists
        object.__setattr__(self, "kv_groups", _checked_groups(self.kv_groups))
        for name in ("reserves", "token_limits"):
            object.__setattr__(self, name, _checked_policies(name, getattr(self, name)))
        self._check_ranges()
        self._check_combinations()

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The configuration called `name`, a key of `PRESETS` or `SYSTEMS`, with `overrides` on top.

        Raises:
            ConfigError: no preset has that name.
        """
        presets = PRESETS | SYSTEMS
        if name not in presets:
            raise ConfigError(f"no preset is called {name!r}; choose one of {', '.join(presets)}")
        values = {**presets[name], **overrides}
        if values.get("enable_prefix_caching") is False and "share_within_step" not in overrides:
            values.pop("share_within_step", None)  # the preset sets what then has no effect
        if values.get("full_sequence_must_fit") is False and "count_owed_blocks" not in overrides:
            values.pop("count_owed_blocks", None)
        return cls(**values)

    def replace(self, **overrides: Any) -> Self:
        """A copy with `overrides`, checked again."""
        return replace(self, **overrides)

    @property
    def prefill_threshold(self) -> int:
        """`long_prefill_token_threshold`, or its default with several partial prefills; 0: none."""
        if self.long_prefill_token_threshold or (self.max_num_partial_prefills or 1) == 1:
            return self.long_prefill_token_threshold
        return max(1, int(self.max_model_len * 0.04))

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: the pool without the reserved ids."""
        return self.num_blocks - self.num_reserved_blocks

    @property
    def has_kv_groups(self) -> bool:
        """Whether KV is in other groups than one of full attention."""
        return self.kv_groups not in ((), (FULL,))

    @property
    def num_seats(self) -> int:
        """Sequence slots: maximum number of requests that hold blocks at once."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def num_usable_tokens(self) -> int:
        """The longest sequence whose KV the usable blocks hold; with `kv_groups`, at most the model's longest."""
        if not self.has_kv_groups:
            return self.num_usable_blocks * self.block_size
        return bisect_right(range(1, self.max_model_len + 1), self.num_usable_blocks, key=self.most_blocks)

    @property
    def num_full_length(self) -> float:
        """Number of requests of the model's longest length that the usable blocks hold at once, if all but one decode:
        the other may have all tokens of a step."""
        usable, most = self.num_usable_blocks, self.most_blocks(self.max_model_len)
        return usable / most if usable <= most else 1 + (usable - most) / self.decode_blocks(self.max_model_len)

    @property
    def num_full_length_tokens(self) -> int:
        """Tokens that the usable blocks hold; with `kv_groups`, in requests of the model's longest length."""
        if not self.has_kv_groups:
            return self.num_usable_blocks * self.block_size
        return int(self.num_full_length * self.max_model_len)

    @property
    def max_tokens_in_flight(self) -> int:
        """Tokens that steps in flight compute at most."""
        return self.max_num_batched_tokens * self.max_steps_in_flight

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds at a time until it has computed its first `num_tokens`."""
        groups = self.kv_groups or (FULL,)
        return sum(group.most_blocks(num_tokens, self.max_tokens_in_flight, self.block_size) for group in groups)

    def decode_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds that decodes, with so many tokens."""
        most = self.max_steps_in_flight * (1 + self.num_draft_tokens)
        groups = self.kv_groups or (FULL,)
        return sum(group.most_blocks(num_tokens, most, self.block_size) for group in groups)

    def max_drafts(self, num_running: int) -> int:
        """Maximum number of draft tokens of a request in a step with `num_running` running ones."""
        most = self.num_draft_tokens
        for running, drafts in self.draft_table:
            if num_running < running:
                break
            most = drafts
        return most

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values; a policy that is an object is given by its name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("order", "victim", "eviction"):
            values[name] = _named(values[name])
        for name in ("reserves", "token_limits"):
            values[name] = [_named(policy) for policy in values[name]]
        return values

    def _check_ranges(self) -> None:
        at_least_one = (
            "num_blocks",
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_steps_in_flight",
            "max_policy_failures",
        )
        for name in at_least_one:
            _check_int(name, getattr(self, name), 1)
        at_least_zero = (
            "num_reserved_blocks",
            "long_prefill_token_threshold",
            "num_draft_tokens",
            "max_loras",
            "max_overtakes",
            *_ENCODER,
        )
        for name in at_least_zero:
            _check_int(name, getattr(self, name), 0)
        decode_reserve: object = self.decode_reserve
        if isinstance(decode_reserve, str) and decode_reserve != "mean":
            raise ConfigError(f'decode_reserve is {decode_reserve!r}; give a number of tokens, or "mean"')
        if decode_reserve != "mean":
            _check_int("decode_reserve", decode_reserve, 0)
        for name in ("max_num_active_seqs", "max_num_partial_prefills", "max_long_partial_prefills"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        for name in (
            "enable_chunked_prefill",
            "long_prefill_token_threshold_adaptive",
            "enable_prefix_caching",
            "share_within_step",
            "full_sequence_must_fit",
            "enable_kv_cache_events",
            "count_common_prefix",
            "log_request_events",
            "first_chunk_only",
            "count_owed_blocks",
            "admit_after_preemption",
            "pad_first_decodes",
            "keep_embeddings",
            "own_preemption_ends_step",
            "encoder_blocks_queue",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.split_encoder_inputs, bool) and self.split_encoder_inputs != "begun":
            raise ConfigError(
                f'split_encoder_inputs is {self.split_encoder_inputs!r}; it must be True, False or "begun"'
            )
        if not isinstance(self.watermark, (int, float)):
            raise ConfigError(f"watermark is {self.watermark!r}; it must be a number, a share of the pool")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}, a share of the pool; choose 0 or more and less than 1")
        if self.kv_load_timeout is not None:
            timeout = self.kv_load_timeout
            if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < math.inf:
                raise ConfigError(f"kv_load_timeout is {timeout!r}; give seconds above 0, or None for no limit")
        _check_choice("preemption_mode", self.preemption_mode, "recompute", "swap", "cheaper")
        _check_choice("kv_load_failure_policy", self.kv_load_failure_policy, "recompute", "fail")
        _check_choice("batching", self.batching, "mixed", "prefill-first", "static")
        _check_choice("admission_charge", self.admission_charge, "uncached", "whole-fits", "whole")
        _check_choice("shortage", self.shortage, "replan", "in-order", "look-ahead")

    def _check_combinations(self) -> None:
        if self.num_usable_blocks < 1:
            raise ConfigError(
                f"num_reserved_blocks is {self.num_reserved_blocks} of num_blocks {self.num_blocks}: none is left for "
                "requests; raise num_blocks"
            )
        if self.max_num_batched_tokens < self.max_num_seqs and self.batching != "prefill-first":
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}: "
                "not every running request could decode in a step; raise the budget or lower max_num_seqs"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold} but enable_chunked_prefill is "
                "off, so it would have no effect; set it to 0 or turn chunked prefill on"
            )
        if self.long_prefill_token_threshold >= self.max_num_batched_tokens:
            raise ConfigError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold} and max_num_batched_tokens "
                f"{self.max_num_batched_tokens}, so it would have no effect; set it below the budget, or to 0"
            )
        self._check_partial_prefills()
        if self.long_prefill_token_threshold_adaptive and not self.prefill_threshold:
            raise ConfigError(
                "long_prefill_token_threshold_adaptive is on and long_prefill_token_threshold is 0, no threshold, "
                "so it would have no effect; set the threshold, or leave it off"
            )
        if self.enable_kv_cache_events and not self.enable_prefix_caching:
            raise ConfigError(
                "enable_kv_cache_events is on and enable_prefix_caching off, so nothing is cached; turn prefix caching "
                "on, or leave it off"
            )
        if self.eviction != "lru" and not self.enable_prefix_caching:
            raise ConfigError(
                f"eviction is {_named(self.eviction)!r}, and enable_prefix_caching is off, so no block is cached; turn "
                "prefix caching on, or leave it at its default"
            )
        if self.count_common_prefix and not self.enable_prefix_caching:
            raise ConfigError(
                "count_common_prefix is on and enable_prefix_caching off, so no block is common to two requests; turn "
                "prefix caching on, or leave it off"
            )
        if self.preemption_mode != "recompute" and not self.enable_prefix_caching:
            raise ConfigError(
                f'preemption_mode is "{self.preemption_mode}" and enable_prefix_caching is off: swapped blocks are '
                'found again through the prefix cache; turn it on, or use "recompute"'
            )
        if not self.share_within_step and not self.enable_prefix_caching:
            raise ConfigError("share_within_step=False has no effect without prefix caching; leave it at its default")
        if self.displace and self.batching != "mixed":
            raise ConfigError(
                f'displace=True has no effect with batching "{self.batching}"; use "mixed" or leave it unset'
            )
        if self.displace and self.order in ("fcfs", "fcfs-front", "priority-by-arrival"):
            raise ConfigError(
                f'displace=True has no effect under order "{self.order}"; use order="priority" or leave it unset'
            )
        capped = self.max_num_partial_prefills is not None or self.max_long_partial_prefills is not None
        if self.max_overtakes != MAX_OVERTAKES and not (self.max_loras or self.encoder_budget or capped):
            raise ConfigError(
                f"max_overtakes is {self.max_overtakes}, and nobody is passed over without adapters, encoder inputs or "
                "a cap on partial prefills; set max_loras, encoder_budget or max_num_partial_prefills, or leave it at "
                "its default"
            )
        self._check_encoder()
        self._check_speculation()
        self._check_prefill_first()

    def _check_encoder(self) -> None:
        for name in ("split_encoder_inputs", "keep_embeddings"):
            value = getattr(self, name)
            if value is not True and not self.encoder_budget:
                raise ConfigError(
                    f"{name}={value!r} has no effect without encoder inputs; set encoder_budget, or leave it at its "
                    "default"
                )
        for name, other in (_ENCODER, _ENCODER[::-1]):
            if getattr(self, name) and not getattr(self, other):
                raise ConfigError(
                    f"{name} is {getattr(self, name)} and {other} is 0, so none is accepted; set {other} too"
                )
        if self.encoder_budget and self.batching == "prefill-first":
            raise ConfigError(
                'encoder inputs need batching "mixed" or "static", and it is "prefill-first"; set encoder_budget to 0'
            )

    def _check_speculation(self) -> None:
        if self.draft_table and not self.num_draft_tokens:
            raise ConfigError(
                f"draft_table is {self.draft_table} and num_draft_tokens 0, so it would have no effect; raise "
                "num_draft_tokens or leave the table empty"
            )
        if self.pad_first_decodes and (not self.num_draft_tokens or self.draft_table or self.batching != "mixed"):
            raise ConfigError(
                "pad_first_decodes=True needs num_draft_tokens, one number for all rows (no draft_table), and batching "
                '"mixed"; leave it at its default'
            )
        for running, drafts in self.draft_table:
            if drafts > self.num_draft_tokens:
                raise ConfigError(
                    f"draft_table allows {drafts} from {running} running requests on, and num_draft_tokens is "
                    f"{self.num_draft_tokens}, so it would have no effect; raise num_draft_tokens or lower the entry"
                )

    def _check_partial_prefills(self) -> None:
        cap, long_cap = self.max_num_partial_prefills, self.max_long_partial_prefills
        if (cap is not None or long_cap is not None) and not self.enable_chunked_prefill:
            raise ConfigError(
                "a cap on partial prefills has no effect with enable_chunked_prefill off, where none is partial; leave "
                "it unset or turn chunked prefill on"
            )
        if long_cap is not None and not self.prefill_threshold:
            raise ConfigError(
                f"max_long_partial_prefills is {long_cap}, and long_prefill_token_threshold is 0, so no prompt is "
                "long; set the threshold"
            )
        if cap is not None and long_cap is not None and long_cap >= cap:
            raise ConfigError(
                f"max_long_partial_prefills is {long_cap} and max_num_partial_prefills {cap}, so it would have no "
                "effect; lower it, or leave it unset"
            )

    def _check_prefill_first(self) -> None:
        if self.batching == "prefill-first" and self.shortage == "replan":
            raise ConfigError(
                'batching "prefill-first" goes row by row when blocks run out; set shortage to "in-order" or '
                '"look-ahead"'
            )
        if self.batching != "prefill-first" and self.num_seats > self.max_num_seqs:
            raise ConfigError(
                f"max_num_active_seqs is {self.max_num_active_seqs}, more than max_num_seqs {self.max_num_seqs}; lower "
                'it, or use batching="prefill-first", where not every active request is in every step'
            )
        if self.admit_after_preemption and self.batching != "mixed":
            raise ConfigError(
                f'admit_after_preemption=True works with batching "mixed" and not "{self.batching}", where a prompt '
                "could be preempted and admitted again for ever while nothing decodes; leave it at its default"
            )
        if not self.count_owed_blocks and not self.full_sequence_must_fit:
            raise ConfigError(
                "count_owed_blocks=False has no effect without full_sequence_must_fit; leave it at its default"
            )


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if not least <= value <= MAX_INT:
        raise ConfigError(f"{name} is {value}; it must be between {least} and {MAX_INT}")


def _check_choice(name: str, value: object, *choices: str) -> None:
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        raise ConfigError(f"{name} is {value!r}; choose {', '.join(others)} or {last}")


def _named(policy: Any) -> Any:
    """How a policy is written down. Parameters of an object are not known, so a name that others could be made by does
    not stand for it."""
    if policy is None or isinstance(policy, str):
        return policy
    return f"{policy.name} (object)" if getattr(policy, "parameters", ()) else policy.name


def _checked_policies(name: str, given: object) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, (tuple, list)):
        raise ConfigError(f'{name} is {given!r}; give a list of names or objects, such as ("watermark:share=0.02",)')
    return tuple(given)


def _checked_groups(given: object) -> tuple[KVGroup, ...]:
    try:
        if isinstance(given, str):
            raise TypeError
        groups = tuple(KVGroup(*group) for group in given)  # type: ignore[attr-defined]
    except TypeError:
        raise ConfigError(
            f'kv_groups is {given!r}; give pairs of a kind and a size, such as (("full", 0), ("window", 1024))'
        ) from None
    for group in groups:
        if group.kind not in KINDS:
            raise ConfigError(f"a group in kv_groups is of kind {group.kind!r}; choose one of {', '.join(KINDS)}")
        if group.is_full and group.size != 0:
            raise ConfigError(f'a group in kv_groups is "full", of size {group.size}; leave the size out')
        if not group.is_full:
            _check_int(f'the size of a "{group.kind}" group in kv_groups', group.size, 1)
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
        _check_int("a number of running requests in draft_table", running, least)
        _check_int("a number of drafts in draft_table", drafts, 0)
        least = running + 1
    return pairs
