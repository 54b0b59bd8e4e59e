"""Failing policies of another package: a simulation continues with the default policy in their place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pointsman.sim.simulator import simulate
from tests import faulty_policies
from tests.faulty_policies import CASES, WHERE, check_log, formatted, knob
from tests.sim.test_simulator import STEP_TIME, config, workload

TIGHT = {"num_blocks": 33, "full_sequence_must_fit": False}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with faulty_policies.installed(tmp_path / "packages"):
        yield


def check_same_lengths(kind: str, at: str, after: int) -> None:
    """Each request has all its tokens, as without the policy."""
    plain = simulate(workload(1), config(**TIGHT), STEP_TIME)
    faulty = simulate(workload(1), config(**TIGHT, **knob(kind, at, after)), STEP_TIME)
    np.testing.assert_array_equal(faulty.timings.num_output_tokens, plain.timings.num_output_tokens)
    np.testing.assert_array_equal(faulty.timings.reason, plain.timings.reason)


@pytest.mark.parametrize(("kind", "at", "after"), CASES)
def test_requests_have_their_lengths_despite_a_failing_policy(
    kind: str, at: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    check_same_lengths(kind, at, after)
    check_log(formatted(caplog.records), kind, at_start=at == "constructor")


@pytest.mark.parametrize("after", [0, 7, 60])
@pytest.mark.parametrize(("kind", "at"), WHERE)
def test_a_failing_policy_method_does_not_end_a_simulation(kind: str, at: str, after: int) -> None:
    check_same_lengths(kind, at, after)
