"""Under `bypass` every step decides as if it checked each request behind the head: two schedulers get the same calls,
and one of them remembers no needs of requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pointsman.core import Request, Scheduler
from pointsman.core.policy.registry import known
from pointsman.core.step import admission, search
from tests.core.helpers import Connector, Host, names
from tests.forms import seeds

from .policies import SMALL

NUM_COUNTED = 120
"""Fixed seeds, for which the number of remembered needs is known; random ones may remember fewer."""
SEEDS = seeds(NUM_COUNTED, 420)
NUM_STEPS = 70
WHOLE = 500
"""A token budget that any prompt fits."""
RESERVES = (
    ("bypass:bound=3,kept=0",),
    ("bypass:bound=3", "watermark:share=0.1"),
    ("watermark:share=0.05", "bypass:bound=2,kept=1", "decode:tokens=4"),
    ("bypass:bound=6", "growth:scale=4"),
    ("mean-decode", "bypass:bound=4"),
    ("full-sequence:counts_owed=False", "bypass:bound=4"),
)


def forgetful(host: Host) -> Host:
    """Make the host's scheduler check requests behind the head in every step, one after the other. If the order may
    change while they wait, it also repeats a search that found nothing."""
    found = host.scheduler._admission._search
    assert found is not None
    found.needs = None
    if found._first is not None:
        found.is_done = lambda kept: False  # type: ignore[method-assign]
    return host


class Twins:
    """Two hosts with the same calls."""

    def __init__(self, chance: random.Random, **config: Any) -> None:
        self.chance = chance
        with_connector = config.pop("connector")
        self.connectors = [Connector() if with_connector else None for _ in range(2)]
        self.hosts = [Host(connector=connector, **config) for connector in self.connectors]
        forgetful(self.hosts[1])
        self.has_same_reasons = not (
            with_connector
            or config["enable_prefix_caching"]
            or config["max_loras"]
            or config["max_num_batched_tokens"] < WHOLE
            or "long_prefill_token_threshold" in config
            or any(str(name).startswith("growth") for name in config["reserves"])
        )
        """Whether needs are exact, so that reasons are equal too. With a prefix cache or a first chunk, a request may
        need more than when it was checked, and still be deferred."""
        self.lengths = chance.choice(
            ((1, 2, 3, 5, 9, 15, 22), (2, 6, 7, 8, 9, 10, 24), (12, 16, 20, 26), (3, 4, 5, 28))
        )
        self.longest = chance.choice((3, 11, 20))
        self.num_known = self.num_steps = 0
        """Number of remembered requests, and number of steps, of a scheduler that may remember some."""
        self.shared = list(range(30))
        self.live: list[str] = []
        self.outputs: list[Any] = []
        self.num_added = 0

    def call(self, method: str, *arguments: Any, **options: Any) -> None:
        for host in self.hosts:
            getattr(host, method)(*arguments, **options)

    def add(self) -> None:
        chance, name = self.chance, f"r{self.num_added}"
        self.num_added += 1
        own = [1000 + 50 * self.num_added + index for index in range(self.lengths[chance.randrange(len(self.lengths))])]
        prompt = [*self.shared[: chance.choice((0, 0, 4, 8, 9, 12))], *own]
        if chance.random() < 0.2:  # after another request's prompt and output
            other = self.hosts[0].scheduler.get_request(chance.choice(self.live)) if self.live else None
            prompt = [*other.all_token_ids.tolist()[:24], *own] if isinstance(other, Request) else prompt
        fields: dict[str, Any] = {"priority": chance.randrange(3), "tenant": f"tenant {chance.randrange(3)}"}
        if chance.random() < 0.1 and self.hosts[0].config.max_loras:
            fields["adapter"] = (f"adapter {chance.randrange(3)}", 1)
        for connector in self.connectors:
            if connector is not None and self.num_added % 4 == 0:
                connector.offers[name] = (4 * (self.num_added % 5), self.num_added % 8 == 0)
        most = self.hosts[0].config.max_model_len - 21
        self.call("add", name, prompt[:most], max_tokens=chance.choice((1, chance.randint(1, self.longest))), **fields)
        self.live.append(name)

    def disturb(self) -> None:
        """Make a rarely used call on both schedulers."""
        chance, first = self.chance, self.hosts[0]
        self.live = [name for name in self.live if first.scheduler.get_request(name) is not None]
        if not self.live:
            return
        name = chance.choice(self.live)
        request = first.scheduler.get_request(name)
        assert request is not None
        what = chance.choice(("abort", "park", "ready", "set_priority", "reset", "seats", "propose"))
        if what == "abort":
            self.call("abort", name)
        elif what == "park" and request.status.name in ("WAITING", "PREEMPTED", "RUNNING"):
            self.call("park", name)
        elif what == "ready" and request.status.name == "WAITING_FOR_GRAMMAR":
            self.call("ready", name)
        elif what == "set_priority":
            self.call("set_priority", name, chance.randrange(4))
        elif what == "reset" and first.config.enable_prefix_caching:
            self.call("reset_prefix_cache")
        elif what == "seats":
            self.call("set_max_num_active_seqs", chance.choice((2, 3, None)))

    def schedule(self) -> None:
        outputs = [host.schedule() for host in self.hosts]
        seen = [
            (
                names(output.requests),
                output.num_scheduled_tokens.tolist(),
                output.block_ids.tolist(),
                names(output.admitted),
                output.num_cached_tokens.tolist(),
                names(output.preempted),
                [load.request.request_id for load in output.loads],
            )
            for output in outputs
        ]
        assert seen[0] == seen[1]
        assert self.hosts[0].stats().deferrals == self.hosts[1].stats().deferrals
        self.outputs.append(outputs)
        self.compare_reasons()

    def finish_step(self) -> None:
        outputs = self.outputs.pop(0)
        for host, output in zip(self.hosts, outputs, strict=True):
            host.update(output)
            for load in output.loads:
                if load.is_async:
                    host.transfer_done(load.transfer_id)

    def fail_step(self) -> None:
        for host, output in zip(self.hosts, self.outputs.pop(), strict=True):
            host.fail(output)

    def compare_reasons(self, *, has_just_stepped: bool = True) -> None:
        """Compare both schedulers' explanations. After a call between two steps, the missing amounts are known only of
        requests that the newest step checked; a request that became the head since was checked earlier."""
        search = self.hosts[0].scheduler._admission._search
        assert search is not None
        if search.needs is not None and has_just_stepped:
            self.num_known += len(search.needs.known)
            self.num_steps += 1
        if search.needs is None or search._first is None or not self.has_same_reasons:
            return
        table = self.hosts[1].scheduler._table
        for name in self.live:
            request = self.hosts[1].scheduler.get_request(name)
            if request is not None:
                found, right = (host.explain(name) for host in self.hosts)
                assert (found.reason, found.since, found.blocker) == (right.reason, right.since, right.blocker), name
                if has_just_stepped or request is table.blocker or request in table.skipped:
                    assert found.missing == right.missing, name


def run(seed: int, config: dict[str, Any]) -> Twins:
    chance = random.Random(seed)
    twins = Twins(chance, **config)
    crowd = chance.choice((0.3, 0.6, 1.2))
    in_flight = config.get("max_steps_in_flight", 1)
    for number in range(NUM_STEPS):
        for _ in range(int(crowd + chance.random()) if number < NUM_STEPS * 0.7 else 0):
            twins.add()
        if chance.random() < 0.15:
            twins.disturb()
            twins.compare_reasons(has_just_stepped=False)
        if len(twins.outputs) < in_flight:
            twins.schedule()
            if chance.random() < 0.03:
                twins.fail_step()
        if twins.outputs and (len(twins.outputs) == in_flight or chance.random() < 0.5):
            twins.finish_step()
    return twins


def draw(seed: int) -> dict[str, Any]:
    """A configuration in which requests lack blocks."""
    chance = random.Random(f"config {seed}")
    order = chance.choice(("fcfs", "fcfs", "priority", *known("order")))
    config: dict[str, Any] = {
        "order": SMALL.get(order, (order,))[0],
        "reserves": chance.choice(RESERVES),
        "num_blocks": chance.choice((12, 16, 24)),
        "max_model_len": 52,
        "block_size": chance.choice((2, 4)),
        "max_num_seqs": chance.choice((3, 6, 12)),
        "max_num_batched_tokens": chance.choice((12, 24, WHOLE, WHOLE)),
        "enable_prefix_caching": chance.random() < 0.7,
        "full_sequence_must_fit": chance.random() < 0.75,
        "max_steps_in_flight": chance.choice((1, 1, 1, 2)),
        "connector": chance.random() < 0.15,
        "max_loras": chance.choice((0, 0, 0, 2)),
        "shortage": chance.choice(("replan", "replan", "in-order")),
    }
    if config["enable_prefix_caching"] and chance.random() < 0.2:
        config["share_within_step"] = False
    config["num_blocks"] = max(config["num_blocks"], 52 // config["block_size"] + 2)
    if chance.random() < 0.2:
        config["enable_chunked_prefill"], config["max_num_batched_tokens"] = False, WHOLE
    elif chance.random() < 0.3:
        config["long_prefill_token_threshold"] = 3
    if chance.random() < 0.1 and config.get("enable_chunked_prefill", True):
        config["max_num_partial_prefills"] = 1
    return config


def test_reusing_the_needs_of_skipped_requests_changes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "check_invariants", lambda _: None)  # other tests do that, and it takes longest
    num_known = num_steps = 0
    for seed in SEEDS:
        with monkeypatch.context() as patch:
            if seed % 3:
                for module in (admission, search):
                    patch.setattr(module, "MAX_SKIPPED", 5)
            try:
                twins = run(seed, draw(seed))
            except AssertionError as error:
                raise AssertionError(f"run({seed}, {draw(seed)}): {error}") from error
            if seed < NUM_COUNTED:
                num_known, num_steps = num_known + twins.num_known, num_steps + twins.num_steps
    assert num_steps > NUM_COUNTED * NUM_STEPS / 3, "most schedulers remember"
    assert num_known > 1.5 * num_steps, "something was remembered"
