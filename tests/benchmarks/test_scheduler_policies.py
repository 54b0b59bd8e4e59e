"""`scheduler_step.py` measures every policy that there is, under a configuration that has it."""

from __future__ import annotations

import pytest
from _scheduler_policies import MOST, MOST_FOR_A_LISTENER, Found, chosen, most_allowed, policies

from pointsman.core import Scheduler, SchedulerConfig
from pointsman.core.policy.registry import known

SMALL = {"num_blocks": 64, "max_model_len": 512}


@pytest.mark.parametrize("found", policies(), ids=str)
def test_the_scheduler_that_is_measured_has_the_policy(found: Found) -> None:
    scheduler = Scheduler(SchedulerConfig(**SMALL, **chosen(found)))  # type: ignore[arg-type]
    assert found.name in str(scheduler.policies)


def test_what_is_told_of_every_step_may_cost_more() -> None:
    allowed = {found.name: most_allowed(found.policy) for found in policies(["fair", "bypass", "target-itl", "growth"])}
    assert allowed == {
        "fair": MOST_FOR_A_LISTENER,
        "bypass": MOST_FOR_A_LISTENER,
        "target-itl": MOST_FOR_A_LISTENER,
    } | {"growth": MOST}


def test_a_policy_of_another_package_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    victims = known("victim")
    monkeypatch.setattr(
        "_scheduler_policies.known", lambda kind: {"mine": victims["latest"]} if kind == "victim" else {}
    )
    assert policies() == [Found("victim", "mine", victims["latest"])]
