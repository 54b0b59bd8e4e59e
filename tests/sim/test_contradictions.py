"""Settings that a log contradicts, whatever the step times are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pointsman.sim.accuracy import Times
from pointsman.sim.contradictions import contradictions
from pointsman.sim.profile import EngineSettings
from tests.sim.measured_logs import SETTINGS, measured_log

FULL = Times.of(measured_log(60, np.inf, output=40))


def test_a_log_contradicts_a_limit_that_more_requests_exceeded() -> None:
    (wrong,) = contradictions(FULL, replace(SETTINGS, max_num_seqs=16))
    assert wrong == (
        "max_num_seqs is 16, but 24 requests ran at a time: it was at least 24, or there were more engines "
        "(--data-parallel-size)"
    )
    assert contradictions(FULL, replace(SETTINGS, max_num_seqs=12, data_parallel_size=2)) == []


def test_a_log_contradicts_a_limit_that_requests_waited_below() -> None:
    (wrong,) = contradictions(FULL, EngineSettings())
    assert wrong.startswith("max_num_seqs is 256, but at most 24 requests ran at a time while others waited: it was 24")


def test_right_settings_are_not_contradicted() -> None:
    assert contradictions(FULL, SETTINGS) == []
    for rate in (0.5, 4.0, 8.0):
        assert contradictions(Times.of(measured_log(60, rate)), SETTINGS) == []
