"""Requests are sent at their times, each token is timed, and a recording is divided into the runs that it has."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest

from benchmarks._open_loop import send
from tests.sim.observed_logs import observed_lines


def test_requests_arrive_at_their_times_whatever_the_engine_does() -> None:
    arrivals, left = [0.0, 0.03, 0.035, 0.3], {}
    start, added = monotonic(), {}

    def add(number: int, late: float) -> None:
        left[number] = 3
        added[number] = monotonic() - start, late

    def step() -> list[tuple[int, int]]:
        sleep(0.02)
        outputs = [(number, min(2, count)) for number, count in left.items()]
        for number, count in outputs:
            left[number] -= count
            if not left[number]:
                del left[number]
        return outputs

    tokens = send(arrivals, add, step, lambda: bool(left))
    for number, arrival in enumerate(arrivals):
        moment, late = added[number]
        assert late >= 0 and moment - late == pytest.approx(arrival, abs=0.02)
        first, second, third = tokens[number]
        assert arrival + 0.02 <= first == second <= third - 0.02


@pytest.mark.soak  # imports the engine
def test_steps_belong_to_the_run_of_their_requests(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("scipy")
    from calibration import steps_of_runs

    from pointsman.sim.step_log import read_steps

    path = tmp_path / "run.jsonl"
    lines = observed_lines(12, rate=0.02)  # one at a time, so that the engine is idle between any two
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    whole, (first, second) = read_steps(path), steps_of_runs(path, [5, 7])
    assert (first.num_requests, second.num_requests) == (5, 7)
    # Alone, a request has a token of each step but those of its unfinished prefill; all prompts fit in one step.
    outputs = {line["id"]: line["num_output_tokens"] for line in lines if line.get("call") == "result"}
    assert len(first.seconds) == sum(outputs[f"r{number}"] for number in range(5))
    assert np.array_equal(np.concatenate([first.loads, second.loads]), whole.loads)
    assert np.array_equal(np.concatenate([first.seconds, second.seconds]), whole.seconds)
