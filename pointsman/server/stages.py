"""Stages: limits at each stage of a request, for all tenants together and for one tenant.

    limits = StageLimits(config, max_num_running=64)
    with limits.texts.hold("alice", 5000):       # ApiError 429, with what the tenant holds and its limit
        ...

`STAGES` is the one table of these limits; docs/guides/share_between_tenants.md shows the same table. Each stage that
the API process limits has a `StageLimit`. If tenants share the limit, one tenant may hold three times the free capacity
(`engine/fair_queue.py`). So a single tenant can hold three quarters of the limit, and a second tenant always gets a
part of the rest. In a server that can have only one tenant, this tenant may hold all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pointsman.engine.fair_queue import CapacityError, SharedCapacity
from pointsman.server.config import OPERATOR
from pointsman.server.wire.errors import ApiError

if TYPE_CHECKING:
    from pointsman.server.config import ServerConfig


MIN_WAIT, MAX_WAIT = 1, 60
"""The range of Retry-After, in seconds."""


def retry_seconds(estimate: float) -> int:
    """The value of Retry-After for an estimated wait, in seconds."""
    return min(max(math.ceil(estimate), MIN_WAIT), MAX_WAIT)


def _min_wait() -> int:
    return MIN_WAIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a request, and the description of the limit there."""

    name: str
    """Value of the label `stage` in metrics."""
    unit: str
    meaning: str
    """Text for the table in the docs: the things that count against the limit, and how long each of them counts."""
    bound: str
    """Description of the limit: the default of `option`, or the fixed limit."""
    option: str | None
    """Option of `pointsman serve` that sets the limit; None: the limit is fixed."""
    bounded_by: Literal["tenant", "all"]
    """"tenant": each tenant may use only a share of the limit; "all": all tenants use it together, without shares."""
    status: int | None
    """HTTP status of a refusal; None: this stage refuses no request."""
    reason: str | None
    """Value of the label `reason` of refusals in metrics; None: this stage refuses no request."""
    held: str = ""
    """Words after the held amount in a refusal, such as "requests are open". `{whose}` stands for " of this tenant", or
    for an empty text."""


CONNECTIONS = Stage(
    name="connections",
    unit="connections",
    meaning="Connections of clients, idle ones too. --max-connections-per-address limits those of one address.",
    bound="4,096, or the open files less 160",
    option="--max-connections",
    bounded_by="all",
    status=503,
    reason="connections",
)
BODIES = Stage(
    name="bodies",
    unit="bytes",
    meaning="Bytes of bodies that arrive or are not parsed yet, beyond the first 64 KiB of each.",
    bound="16 times --max-request-bytes",
    option="--max-total-request-bytes",
    bounded_by="tenant",
    status=429,
    reason="queue_bytes",
    held="bytes of request bodies{whose} are in memory",
)
TEXTS = Stage(
    name="texts",
    unit="characters",
    meaning="Characters of texts that wait for or are in tokenization, rendering or detokenization.",
    bound="4 times --max-request-bytes",
    option="--max-waiting-characters",
    bounded_by="tenant",
    status=429,
    reason="queue_characters",
    held="characters{whose} wait to be tokenized",
)
REQUESTS = Stage(
    name="requests",
    unit="requests",
    meaning="Requests from arrival to finish, waiting or running; each of n samples is one.",
    bound="1,024 beyond --max-num-seqs",
    option="--max-waiting-requests",
    bounded_by="tenant",
    status=429,
    reason="queue_requests",
    held="requests{whose} are open",
)
PROMPT_TOKENS = Stage(
    name="prompt_tokens",
    unit="tokens",
    meaning="Tokens of prompts whose request has no first token yet.",
    bound="none",
    option="--max-waiting-prompt-tokens",
    bounded_by="tenant",
    status=429,
    reason="queue_tokens",
    held="prompt tokens{whose} wait for their prefill",
)
GRAMMARS = Stage(
    name="grammars",
    unit="requests",
    meaning="Requests that were sent to the engine, and whose grammar is not compiled yet.",
    bound="1,024",
    option=None,
    bounded_by="tenant",
    status=429,
    reason="queue_grammars",
    held="requests{whose} wait for a grammar",
)
RUNNING = Stage(
    name="running",
    unit="requests",
    meaning="Requests in the batch. --order chooses them; fair orders divide the batch among tenants.",
    bound="64",
    option="--max-num-seqs",
    bounded_by="all",
    status=None,
    reason=None,
)
RETAINED = Stage(
    name="retained",
    unit="blocks",
    meaning="Cached blocks that clients asked to retain (only with --eviction retention).",
    bound="all blocks, each for at most 600 seconds; divided evenly among tenants",
    option="--max-retention",
    bounded_by="tenant",
    status=None,
    reason=None,
)

STAGES = (CONNECTIONS, BODIES, TEXTS, REQUESTS, PROMPT_TOKENS, GRAMMARS, RUNNING, RETAINED)
"""All stages, in the order in which a request passes them."""

MAX_WAITING_GRAMMARS = 1024
"""Maximum number of clients' requests that wait for a grammar. Many may wait for the same grammar; the engine limits
the number of grammars."""


class StageLimit:
    """The limit of one stage, and the amount that each tenant holds. To be used in one event loop.

    Args:
        stage: one of `STAGES`.
        size: maximum amount, in the stage's unit; None: no limit.
        is_shared: whether there may be several tenants.
    """

    def __init__(self, stage: Stage, size: int | None, *, is_shared: bool) -> None:
        self.stage = stage
        self.size = size
        self._capacity = SharedCapacity(2**63 if size is None else size, is_shared=is_shared and size is not None)

    @property
    def total(self) -> int:
        """The amount that all tenants together hold, in the stage's unit."""
        return self._capacity.total

    def held_by(self, tenant: str) -> int:
        """The amount that the tenant holds, in the stage's unit."""
        return self._capacity.held.get(tenant, 0)

    @property
    def by_tenant(self) -> dict[str, int]:
        """The amount that each tenant holds, in the stage's unit; tenants that hold nothing are left out."""
        return self._capacity.held

    def take(
        self, tenant: str, amount: int, *, held_for_request: int = 0, retry_after: Callable[[], int] = _min_wait
    ) -> None:
        """Add to the amount that a tenant holds.

        Args:
            tenant: the request's tenant.
            amount: additional amount, in the stage's unit.
            held_for_request: amount that the tenant already holds for the same request.
            retry_after: returns the seconds for Retry-After of a refusal, if the stage can estimate them.

        Raises:
            ApiError: the limit or the tenant's share is exhausted; with the stage's status and reason. The held amount
                is unchanged.
        """
        try:
            if amount:
                self._capacity.take(tenant, amount, held_for_request)
        except CapacityError as error:
            raise self._refusal(error, amount, retry_after()) from None

    def give_back(self, tenant: str, amount: int) -> None:
        """Subtract from the amount that a tenant holds."""
        if amount:
            self._capacity.give_back(tenant, amount)

    @contextmanager
    def hold(self, tenant: str, amount: int, retry_after: Callable[[], int] = _min_wait) -> Iterator[None]:
        """Context in which a tenant holds an additional amount, in the stage's unit.

        Raises:
            ApiError: as for `take`.
        """
        self.take(tenant, amount, retry_after=retry_after)
        try:
            yield
        finally:
            self.give_back(tenant, amount)

    def _refusal(self, error: CapacityError, amount: int, retry_after: int) -> ApiError:
        stage = self.stage
        assert stage.status is not None
        if error.total + amount > error.size:
            held, maximum, whose = error.total, error.size, ""
        else:
            held, maximum, whose = error.held, error.max_held, " of this tenant"
        return ApiError(
            stage.status,
            f"the server is overloaded: {held} {stage.held.format(whose=whose)}, this request would add {amount}, and "
            f"the limit is {maximum}; try again in {retry_after} s",
            headers={"retry-after": str(retry_after)},
            reason=stage.reason,
        )


class StageLimits:
    """The limits of all stages of the API process.

    Args:
        config: the operator's settings.
        max_num_running: maximum number of requests that run concurrently in all engines together.
    """

    def __init__(self, config: ServerConfig, max_num_running: int) -> None:
        is_shared = has_tenants(config)
        # The tenant in the body's field `user` is unknown until the body is read, so this tenant cannot have a share.
        self.bodies = StageLimit(
            BODIES, config.body_budget, is_shared=is_shared and (config.tenant_from != "user" or _has_key_names(config))
        )
        self.texts = StageLimit(TEXTS, config.text_budget, is_shared=is_shared)
        self.requests = StageLimit(REQUESTS, max_num_running + config.max_waiting_requests, is_shared=is_shared)
        self.prompt_tokens = StageLimit(PROMPT_TOKENS, config.max_waiting_prompt_tokens, is_shared=is_shared)
        self.grammars = StageLimit(GRAMMARS, MAX_WAITING_GRAMMARS, is_shared=is_shared)

    def all(self) -> tuple[StageLimit, ...]:
        """The limits of all stages that the API process limits with a `StageLimit`, in the order of `STAGES`."""
        return self.bodies, self.texts, self.requests, self.prompt_tokens, self.grammars


def has_tenants(config: ServerConfig) -> bool:
    """Whether requests may be of several tenants."""
    return config.tenant_from != "key" or _has_key_names(config)


def _has_key_names(config: ServerConfig) -> bool:
    """Whether keys alone distinguish several tenants; if clients have keys, an operator with a key is a tenant."""
    operators = {OPERATOR} if config.api_keys and config.operator_keys else set()
    return len(operators.union(config.tenants)) > 1
