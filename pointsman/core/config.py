"""Every knob of the scheduler: one validated dataclass, a docstring under each field, and the presets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pointsman.core.errors import ConfigError

if TYPE_CHECKING:
    from pointsman.core.preemption import Victim
    from pointsman.core.queue import Order

MAX_INT = 2**31 - 1  # token and block counts travel as int32

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    # For comparison.
    "static": {"batching": "static"},
    # Short steps: few requests share one, and a prompt's chunk delays the others' next token little.
    "low-latency": {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "enable_chunked_prefill": True},
    # Full steps: weights are read once for many tokens, and each request waits longer for its next one.
    "high-throughput": {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "enable_chunked_prefill": True},
    # Few enough seats that long sequences fit the pool together, and chunks large enough to get through a prompt.
    "long-context": {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "enable_chunked_prefill": True},
    # Many small requests: each prompt is computed at once or waits, so that none is left half done.
    "short-requests": {"max_num_seqs": 512, "max_num_batched_tokens": 4096, "enable_chunked_prefill": False},
}
"""Named settings to start from; what is not named keeps its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a `Scheduler` behaves. Immutable, checked as a whole when it is built.

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
    """Block ids 0 to num_reserved_blocks - 1 are never handed out (vLLM's null block, a trash block)."""

    max_num_seqs: int = 256
    """Most requests that run at once."""
    max_num_batched_tokens: int = 8192
    """Token budget: most tokens that one step computes, over all requests."""
    max_steps_in_flight: int = 1
    """How many outputs of `schedule` may be without their `update`; 1 is synchronous."""

    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps. Off: a prompt starts only if all its uncached
    tokens fit one step, and one longer than the budget is refused. A resumed request may always be chunked."""
    long_prefill_token_threshold: int = 0
    """Most tokens that one request may advance in a step, so that a long prompt leaves room for others; 0: no limit."""

    enable_prefix_caching: bool = True
    """Whether full blocks are kept, after use, to be found again by equal content."""
    share_within_step: bool = True
    """Whether a request may read blocks that another one writes in the same step. The host must then write a
    layer's KV for all rows before any row attends."""

    order: str | Order = "fcfs"
    """Who is admitted next: "fcfs", "priority", or an object with the `Order` protocol."""
    victim: str | Victim | None = None
    """Who gives way when blocks run out: "latest", "lowest-priority", an object with the `Victim` protocol, or
    None: "lowest-priority" under the order "priority", otherwise "latest"."""
    displace: bool | None = None
    """Under "priority": whether a strictly more urgent waiting request takes the room of less urgent running
    ones. None: yes under "priority". Under an order without urgency, True is an error."""

    watermark: float = 0.0
    """Share of the pool, rounded down to blocks and at least one, that an admission must leave free while something
    runs, as headroom for what runs. 0: none."""
    full_sequence_must_fit: bool = True
    """Admit only if the whole known sequence fits, not just its first chunk, beside what partly computed
    prompts are still owed."""

    batching: Literal["mixed", "static"] = "mixed"
    """"mixed": requests join and leave at every step. "static": admit only when nothing runs (for comparison)."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_combinations()

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The configuration called `name`, a key of `PRESETS`, with `overrides` on top.

        Raises:
            ConfigError: no preset has that name.
        """
        if name not in PRESETS:
            raise ConfigError(f"no preset is called {name!r}; choose one of {', '.join(PRESETS)}")
        return cls(**{**PRESETS[name], **overrides})

    def replace(self, **overrides: Any) -> Self:
        """A copy with `overrides`, checked again."""
        return replace(self, **overrides)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: the pool without the reserved ids."""
        return self.num_blocks - self.num_reserved_blocks

    @property
    def num_usable_tokens(self) -> int:
        """Tokens whose KV the usable blocks hold."""
        return self.num_usable_blocks * self.block_size

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values; a policy object is given by its `name`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("order", "victim"):
            if values[name] is not None and not isinstance(values[name], str):
                values[name] = values[name].name
        return values

    def _check_ranges(self) -> None:
        at_least_one = (
            "num_blocks",
            "max_model_len",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_steps_in_flight",
        )
        for name in at_least_one:
            _check_int(name, getattr(self, name), 1)
        for name in ("num_reserved_blocks", "long_prefill_token_threshold"):
            _check_int(name, getattr(self, name), 0)
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "share_within_step", "full_sequence_must_fit"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not isinstance(self.watermark, (int, float)):
            raise ConfigError(f"watermark is {self.watermark!r}; it must be a number, a share of the pool")
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark is {self.watermark}, a share of the pool; choose 0 or more and less than 1")
        if self.batching not in ("mixed", "static"):
            raise ConfigError(f'batching is {self.batching!r}; choose "mixed" or "static"')

    def _check_combinations(self) -> None:
        if self.num_usable_blocks < 1:
            raise ConfigError(
                f"num_reserved_blocks is {self.num_reserved_blocks} of num_blocks {self.num_blocks}: none is left for "
                "requests; raise num_blocks"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
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
        if not self.share_within_step and not self.enable_prefix_caching:
            raise ConfigError("share_within_step=False has no effect without prefix caching; leave it at its default")
        if self.displace and self.batching == "static":
            raise ConfigError('displace=True has no effect with batching "static"; use "mixed" or leave it unset')
        if self.displace and self.order == "fcfs":
            raise ConfigError('displace=True has no effect under order "fcfs"; use order="priority" or leave it unset')


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if not least <= value <= MAX_INT:
        raise ConfigError(f"{name} is {value}; it must be between {least} and {MAX_INT}")
