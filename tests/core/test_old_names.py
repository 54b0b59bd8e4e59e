"""Names that were public before still work, and warn."""

from __future__ import annotations

import pytest

from pointsman import Request, Scheduler, SchedulerConfig
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.registry import make


def test_old_names_of_the_scheduler_warn() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64, max_num_seqs=3))
    request = Request("a", [1], max_tokens=1, eos_token_ids=(), arrival_time=0.0)
    with pytest.warns(DeprecationWarning, match="`horizon` is now called `guaranteed_steps`"):
        assert scheduler.horizon() == scheduler.guaranteed_steps()
    with pytest.warns(DeprecationWarning, match="`num_sequence_slots`"):
        assert scheduler.config.num_seats == 3
    with pytest.warns(DeprecationWarning, match="`max_blocks`"):
        assert scheduler.config.most_blocks(17) == 2
    with pytest.warns(DeprecationWarning, match="`num_bypassed`"):
        assert request.num_overtaken == 0


def test_old_names_of_a_policy_warn() -> None:
    class Older(FirstComeFirstServed):
        name = "older"
        displaces = True

        def horizon(self, num_steps: int) -> int:
            return 7

    with pytest.warns(DeprecationWarning) as warnings:
        order = make("order", Older())
    assert [str(each.message) for each in warnings] == [
        "`Older.displaces` is now called `is_preemptive`",
        "`Older.horizon` is now called `guaranteed_steps`",
    ]
    assert order.is_preemptive is True
    assert order.guaranteed_steps(9) == 7
