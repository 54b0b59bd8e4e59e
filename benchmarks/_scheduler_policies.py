"""Cost of a step under each policy, as a ratio to `fcfs` with `latest` and neither reserve nor limit.

There are three situations: steady decode with no waiting request; steady decode with 10,000 waiting requests, all of
which lack blocks; and a small pool with the same number waiting, where steps admit, preempt and finish requests. A
policy and the plain scheduler alternate in one process. Policies are found in the registry, with their default
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import median
from typing import Any, NamedTuple

from _common import Targets, print_table
from _worker_process import WorkerProcess

from pointsman.core import SchedulerConfig
from pointsman.core.policy.policy import Policy
from pointsman.core.policy.registry import KINDS, known

RUNNING = (16, 256, 4096)
WAITING = 10_000
WAITING_RUNNING = 256
SHORT_POOL = 256 * 8
"""Number of blocks that about 256 requests of the following lengths fill."""
PROMPTS, OUTPUTS = (48, 80), (64, 192)
STEPS = {16: 127, 256: 127, 4096: 31}
PASSES = {16: 3, 256: 2}
"""Factor of the rounds of a situation: rounds with few requests are over in milliseconds."""
WAITING_STEPS = 32
SHORT_STEPS = 48
BLOCK_SIZE = 16
TOKEN_BUDGET = 8_192
HEADROOM = 288
"""Maximum tokens of a request before the first timed step."""
MAX = 1.3
MAX_FOR_A_LISTENER = 1.5
"""Maximum ratio for a policy that observes every step, and for one that searches the queue."""
EACH_STEP = ("on_step", "on_update", "on_advanced", "on_step_time")
FIELDS = {"reserve": "reserves", "limit": "token_limits"}
"""Fields of the configuration whose name differs from the kind."""
DEFAULTS = {each.name: each.default for each in fields(SchedulerConfig)}


class Found(NamedTuple):
    """A policy of the registry."""

    kind: str
    name: str
    policy: type[Policy]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Situation(NamedTuple):
    """A situation in which a step is timed: the settings, how to open a session, and the command that times it."""

    name: str
    rounds: int
    settings: dict[str, Any]
    open: tuple[str, dict[str, Any]]
    time: tuple[str, dict[str, Any]]


def situations(rounds: int, num_policies: int) -> list[Situation]:
    """All situations. The plain scheduler runs in every round of every policy, so its requests need blocks for all."""
    found: list[Situation] = []
    for running in RUNNING:
        more, steps = rounds * PASSES.get(running, 1), STEPS[running]
        settings = _settings(running, HEADROOM + (1 + more) * steps * num_policies)
        opened = ("open", {"running": running, "waiting": None})
        found.append(Situation(f"{running} running", more, settings, opened, ("decode", {"steps": steps})))
    num_tokens = HEADROOM + (1 + rounds) * WAITING_STEPS * num_policies
    settings = _settings(WAITING_RUNNING, num_tokens)
    length = settings["num_blocks"] * BLOCK_SIZE  # waiting requests are as long; their whole output is reserved
    settings |= {"max_num_seqs": 2 * WAITING_RUNNING, "max_model_len": length, "max_tokens": num_tokens - HEADROOM // 2}
    settings["knobs"] = {"decode_reserve": length}
    opened = ("open", {"running": WAITING_RUNNING, "waiting": WAITING})
    found.append(Situation(f"{WAITING:,} waiting", rounds, settings, opened, ("decode", {"steps": WAITING_STEPS})))
    settings = {**_settings(4 * WAITING_RUNNING, 1_024), "num_blocks": 1 + SHORT_POOL}
    opened = ("open_shortage", {"waiting": WAITING, "prompts": PROMPTS, "outputs": OUTPUTS})
    found.append(Situation("short pool", rounds, settings, opened, ("shortage", {"steps": SHORT_STEPS})))
    return found


def _settings(running: int, num_tokens: int) -> dict[str, Any]:
    """Settings for requests with this number of tokens in all."""
    return {
        "num_blocks": 1 + running * -(-num_tokens // BLOCK_SIZE),
        "max_model_len": num_tokens,
        "max_num_seqs": running,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "knobs": {},
    }


def policies(names: Sequence[str] = ()) -> list[Found]:
    """All registered policies; with `names`, only the policies of these names."""
    found = [Found(kind, name, policy) for kind in KINDS for name, policy in known(kind).items()]
    return [each for each in found if not names or each.name in names]


def chosen(found: Found) -> dict[str, Any]:
    """The field of `SchedulerConfig` that selects this policy, with its value."""
    field = FIELDS.get(found.kind, found.kind)
    return {field: [found.name] if isinstance(DEFAULTS[field], tuple) else found.name}


def max_allowed(policy: type[Policy]) -> float:
    """The target for a policy: maximum ratio to a step without it."""
    listens = any(getattr(policy, event) is not getattr(Policy, event) for event in EACH_STEP)
    return MAX_FOR_A_LISTENER if listens or hasattr(policy, "allows_bypass") else MAX


def measure(
    worker: WorkerProcess, situation: Situation, found: Sequence[Found]
) -> tuple[list[float], dict[Found, list[float]]]:
    """CPU us of a plain step, in every round; and for each policy and round, the ratio of its step to a plain one."""

    def open_session(name: str, knobs: dict[str, Any]) -> None:
        what, how = situation.open
        settings = {**situation.settings, "knobs": {**situation.settings["knobs"], **knobs}}
        worker.ask(what, name=name, settings=settings, **how)

    def ask(name: str) -> float:
        what, how = situation.time
        us: float = worker.ask(what, name=name, **how)["us"]
        return us

    plain: list[float] = []
    ratios: dict[Found, list[float]] = {}
    open_session("plain", {})
    for each in found:
        open_session("policy", chosen(each))
        pairs = [(ask("policy"), ask("plain")) for _ in range(1 + situation.rounds)][1:]  # the first one warms up
        worker.ask("close", name="policy")
        plain += [us for _, us in pairs]
        ratios[each] = [with_it / us for with_it, us in pairs]
    worker.ask("close", name="plain")
    return plain, ratios


def report_policies(worker: WorkerProcess, names: Sequence[str], rounds: int, targets: Targets) -> dict[str, Any]:
    """Measure these policies, or all, in every situation: table, figures, targets."""
    found = policies(names)
    for left_out in set(policies()) - set(found):
        targets.skip(f"a step under {left_out}", "not among --policies")
    ratios: dict[Found, dict[str, float]] = {each: {} for each in found}
    plain_us: dict[str, float] = {}
    for situation in situations(rounds, len(found)):
        plain, times = measure(worker, situation, found)
        plain_us[situation.name] = round(median(plain), 2)
        for each, values in times.items():
            ratios[each][situation.name] = round(median(values), 3)
    rows: list[list[object]] = []
    for each, row in ratios.items():
        most = max_allowed(each.policy)
        for where, ratio in row.items():
            targets.at_most(f"a step under {each} / a plain one, {where},", ratio, most)
        rows.append([each.kind, each.name, *row.values(), most])
    rows.append(["", "plain, us", *plain_us.values(), None])
    print_table(
        f"times the CPU of a step under fcfs and latest; where others wait, about {WAITING_RUNNING} run",
        ["kind", "policy", *plain_us, "target"],
        rows,
    )
    return {"policy_ratios": {str(each): row for each, row in ratios.items()}, "policy_plain_us": plain_us}
