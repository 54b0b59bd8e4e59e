"""Assembly: creates the parts of one scheduler and connects the parts with each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ConfigError
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.connector import KVConnector
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.transfers import Transfers, make_transfers
from pointsman.core.policy.adapters import AdapterSlots
from pointsman.core.policy.budget import StepBudget, TokenBudget
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.policy.guard import Guard, GuardedVictim, Replaced
from pointsman.core.policy.limits import ChunkEnds, limits_of
from pointsman.core.policy.listening import listeners_of
from pointsman.core.policy.partial_prefills import make_partial_prefills
from pointsman.core.policy.prefill_interval import make_prefill_interval
from pointsman.core.policy.registry import check_cuts, make
from pointsman.core.policy.reserve import Reserves, reserves_of
from pointsman.core.policy.swap import Swap, make_swap
from pointsman.core.policy.victim import default_victim
from pointsman.core.policy.view import SchedulerView
from pointsman.core.state.batch import Batch
from pointsman.core.state.events import Events, Listener
from pointsman.core.step.admission import Admission, Gates
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.emit import Emission
from pointsman.core.step.fast_forward import FastForward
from pointsman.core.step.in_flight import StepsInFlight
from pointsman.core.step.loading import Loading, make_loading
from pointsman.core.step.priority_preemption import PriorityPreemption, has_priority_preemption
from pointsman.core.step.prompt_parts import PromptParts
from pointsman.core.step.request_table import RequestTable
from pointsman.core.step.running import InOrder, Running
from pointsman.core.step.update import Update


class Start(NamedTuple):
    """First step number and first admission number of a scheduler, and its replaced policies. A scheduler that is reset
    for a recording continues with its former numbers and replaced policies."""

    step_id: int = 0
    serial: int = 1
    replaced: tuple[Replaced, ...] = ()
    """Policies of other packages that failed earlier, each with its replacement."""


NEW = Start()
"""The start of a new scheduler."""


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of one scheduler."""

    batch: Batch
    kv: KVCache
    transfers: Transfers | None
    """Transfers, and the blocks that they hold for requests without a row; None: there is no connector."""
    swap: Swap | None
    """Part that decides which preempted requests swap; None: no request swaps."""
    table: RequestTable
    steps: StepsInFlight
    gates: Gates
    encoder: EncoderCache | None
    """Cache of the embeddings of encoder inputs; None: encoder inputs are refused."""
    drafts: Drafts
    running: Running
    loading: Loading | None
    admission: Admission
    priority_preemption: PriorityPreemption | None
    emission: Emission
    prompt_parts: PromptParts
    update: Update
    fast_forward: FastForward
    view: SchedulerView
    """The policies' view of the scheduler."""
    budget: StepBudget
    policies: tuple[Any, ...]
    """The order, the victim policy, the reserves, the limits and the eviction policy."""
    policy_listeners: list[Listener]


def assemble(
    config: SchedulerConfig,
    start: Start,
    connector: KVConnector | None,
    events: Events,
    accepted_drafts: list[int],
    kv_cache: KVCache | None = None,
    *,
    checks_guaranteed_steps: bool = False,
) -> Parts:
    """Create the parts of a scheduler for a configuration.

    Args:
        kv_cache: owner of the KV blocks; None: a new `KVCacheManager`.
        accepted_drafts: the list that counts accepted drafts, see `Acceptance`.
        checks_guaranteed_steps: whether `advance` checks the policies' `guaranteed_steps`, see `Scheduler`.

    Raises:
        ConfigError: the configuration names a policy that does not exist, or needs a connector and there is none.
    """
    made = partial(make, replaced=start.replaced)
    eviction = made("eviction", config.eviction)
    kv: KVCache
    transfers: Transfers | None = None
    swap: Swap | None = None
    own: KVCacheManager | None = None
    if config.has_kv_groups and kv_cache is not None:
        raise ConfigError(
            f"kv_groups has {len(config.kv_groups)} groups, but the kv_cache passed to the scheduler has its own "
            "groups; leave out kv_groups or kv_cache"
        )
    if kv_cache is None:
        kv = own = KVCacheManager(config, eviction)
        kv.track_returned(events.wants_blocks)
        transfers, swap = make_transfers(config, own, connector), make_swap(config, own)
    else:
        kv = kv_cache
    batch = Batch(config.block_size, accepted_drafts)
    if swap is not None and transfers is not None and swap.compares:
        transfers.set_load_criterion(swap.is_worth_loading)
    steps = StepsInFlight(config.max_steps_in_flight)
    kv.set_token_counters(steps.num_final_tokens, steps.num_tokens)
    drafts = Drafts(config, batch, events, start.step_id - 1)
    budget = StepBudget(config)
    encoder = EncoderCache(config, budget) if config.encoder_budget else None
    queue = made("order", config.order)
    victim = made("victim", default_victim(queue.name) if config.victim is None else config.victim)
    if isinstance(victim, GuardedVictim):
        victim.set_order(queue.name)
    view = SchedulerView(batch, kv, queue)
    ends = ChunkEnds(kv, budget, view) if kv.cuts_chunks else None
    interval = make_prefill_interval(config, batch)
    limits = [made("limit", limit) for limit in limits_of(config, ends, encoder)]
    if interval is not None:
        limits.insert(0, interval)  # before limits that skip a request, as it blocks the queue
    reserves = [made("reserve", reserve) for reserve in reserves_of(config)]
    budget.set_policies(tuple(limit for limit in limits if hasattr(limit, "step_budget")))
    check_cuts(config, limits)
    gates = Gates(
        AdapterSlots(config),
        TokenBudget(config, budget),
        limits,
        make_partial_prefills(config, batch),
        interval,
        Reserves(reserves, kv, view),
    )
    policies = (queue, victim, *reserves, *limits, eviction)
    for policy in policies:
        if hasattr(policy, "attach"):
            policy.attach(view)
        if isinstance(policy, Guard):
            policy.log_start()
    running_part = Running if config.shortage == "replan" else InOrder
    running = running_part(config, budget, batch, kv, gates.limits, victim, view, drafts)
    table = RequestTable(batch, kv, queue, gates.releases, steps, events, transfers, swap, start.serial)
    loading = None if own is None else make_loading(config, own, table, transfers, events)
    admission = Admission(config, budget, view, batch, kv, running, table, gates, events, transfers, loading)
    priority_preemption = None
    if has_priority_preemption(config, queue):
        priority_preemption = PriorityPreemption(config, batch, kv, running, admission, encoder, drafts)
    emission = Emission(config, batch, kv, table, encoder)
    prompt_parts = PromptParts(config, kv, table)
    update = Update(batch, kv, table, steps, prompt_parts, encoder, transfers)
    fast_forward = FastForward(
        config,
        batch,
        kv,
        table,
        steps,
        running,
        drafts,
        transfers,
        admission,
        priority_preemption,
        emission,
        update,
        events,
        checks_guaranteed_steps=checks_guaranteed_steps,
    )
    return Parts(
        batch,
        kv,
        transfers,
        swap,
        table,
        steps,
        gates,
        encoder,
        drafts,
        running,
        loading,
        admission,
        priority_preemption,
        emission,
        prompt_parts,
        update,
        fast_forward,
        view,
        budget,
        policies,
        listeners_of(policies if swap is None or not swap.compares else (*policies, swap)),
    )
