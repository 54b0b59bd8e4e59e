"""A router that is not there is said to be missing, with what installs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from _common import Targets
from _router_process import RouterMissing, find_router
from _scale_router import FAILED, HIT_RATE, check_router
from router_env import ROUTER_VERSION


def test_a_router_that_is_not_installed_is_named_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(RouterMissing) as caught:
        find_router(tmp_path)
    for part in (ROUTER_VERSION, str(tmp_path), "python benchmarks/router_env.py"):
        assert part in str(caught.value)


def test_its_targets_are_then_not_measured() -> None:
    targets = Targets()
    check_router(targets, None)
    assert not targets.met and not targets.missed
    assert [what.partition(" (")[0] for what in targets.not_measured] == [HIT_RATE, FAILED]
    assert all("router_env.py" in what for what in targets.not_measured)


def test_a_failed_request_or_a_low_hit_rate_misses_them() -> None:
    targets = Targets()
    good = {"hit_rate": 0.82}
    check_router(targets, {"cache_aware": good, "drain": {"requests": 70, "failed": 0, "exit_code": 0}})
    assert len(targets.met) == 3 and not targets.missed
    check_router(targets, {"cache_aware": {"hit_rate": 0.7}, "drain": {"requests": 70, "failed": 1, "exit_code": 1}})
    assert len(targets.missed) == 3
