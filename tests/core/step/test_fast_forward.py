"""Fast-forward: the number of guaranteed steps, the state after them, and refused calls.
`tests/property/test_fast_forward.py` compares `advance` with single steps in any state."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    FinishReason,
    Listener,
    PauseMode,
    Reason,
    Recorder,
    ReplayDifference,
    StepOrderError,
    StepResultError,
    replay,
)
from pointsman.core.state.events import StepRun
from tests.core.helpers import EOS, Host


def decoding(num_requests: int = 2, **overrides: Any) -> Host:
    """A host whose requests decode: each has 4 prompt tokens in a block, and one sampled token."""
    host = Host(**{"enable_prefix_caching": False, **overrides})
    for index in range(num_requests):
        host.add(f"r{index}", 4, max_tokens=20)
    host.step()
    return host


def ends(num_steps: int, start: float = 100.0) -> list[float]:
    return [start + index for index in range(num_steps + 1)]


# ---------------------------------------------------------------------- guaranteed_steps


def test_steps_are_guaranteed_until_the_first_token_limit() -> None:
    host = decoding()
    host.add("short", 4, max_tokens=5)
    host.step()
    assert host.scheduler.guaranteed_steps() == 4
    assert host.scheduler.guaranteed_steps(3) == 3
    assert host.scheduler.guaranteed_steps(0) == 0


def test_steps_are_guaranteed_until_blocks_run_out() -> None:
    """Two rows of 1 block and 5 tokens take their second block at once; 2 + 2 x 2 blocks allow 4 steps."""
    host = decoding(num_blocks=6)
    assert host.scheduler.guaranteed_steps() == 8
    assert decoding(num_blocks=4).scheduler.guaranteed_steps() == 4


def test_no_steps_are_guaranteed_during_a_prefill() -> None:
    host = decoding()
    host.add("long", 30)
    host.step()
    assert host.scheduler.guaranteed_steps() == 0
    host.step()
    assert host.scheduler.guaranteed_steps() == 0
    host.step()
    assert host.scheduler.guaranteed_steps() > 0


def test_no_steps_are_guaranteed_when_idle_or_with_a_step_in_flight() -> None:
    host = Host()
    assert host.scheduler.guaranteed_steps() == 0
    host = decoding(max_steps_in_flight=2)
    output = host.schedule()
    assert host.scheduler.guaranteed_steps() == 0
    host.update(output)
    assert host.scheduler.guaranteed_steps() > 0


def test_no_steps_are_guaranteed_until_a_new_request_was_checked() -> None:
    host = decoding(max_num_seqs=2)
    host.add("waits", 4)
    assert host.scheduler.guaranteed_steps() == 0
    host.step()
    assert host.scheduler.guaranteed_steps() == 18


def test_steps_are_guaranteed_while_the_queue_waits_for_blocks() -> None:
    """The number of free blocks only falls; a step in which it changes the reason is decided on its own."""
    host = decoding(1, num_blocks=8, watermark=0.4, max_model_len=30, full_sequence_must_fit=False)
    host.add("waits", 16)
    host.step()
    assert host.explain("waits").reason is Reason.WATERMARK
    guaranteed_steps = host.scheduler.guaranteed_steps()
    assert guaranteed_steps == 11
    host.scheduler.advance(ends(guaranteed_steps), [7])
    host.now = 120.0
    assert host.explain("waits").reason is Reason.WATERMARK
    host.step()
    assert host.explain("waits").reason is Reason.BLOCKS


def test_no_steps_are_guaranteed_in_a_full_pause() -> None:
    host = decoding()
    host.scheduler.pause(50.0, PauseMode.ALL)
    assert host.scheduler.guaranteed_steps() == 0
    host.scheduler.pause(51.0, PauseMode.ADMISSIONS)
    assert host.scheduler.guaranteed_steps() == 19


class EveryStep(Listener):
    def on_step(self, step: object) -> None: ...


class Runs(Listener):
    def __init__(self) -> None:
        self.runs: list[StepRun] = []

    def on_steps(self, run: StepRun) -> None:
        self.runs.append(run)


def test_no_steps_are_guaranteed_if_a_listener_needs_every_step() -> None:
    host = decoding()
    listener = EveryStep()
    host.scheduler.add_listener(listener)
    assert host.scheduler.guaranteed_steps() == 0
    host.scheduler.remove_listener(listener)
    host.scheduler.add_listener(Runs())
    assert host.scheduler.guaranteed_steps() == 19


# ---------------------------------------------------------------------- advance


def test_advance_has_the_effects_and_reports_of_single_steps() -> None:
    host, listener = decoding(max_num_seqs=2), Runs()
    host.add("waits", 4)
    host.step()
    host.scheduler.add_listener(listener)
    before = host.scheduler.stats()
    update = host.scheduler.advance(np.array(ends(6)), np.array([7, 8], dtype=np.int32))
    host.now = 120.0
    assert (update.token_ids.tolist(), update.counts.tolist(), update.finished) == ([7, 8], [1, 1], ())
    request = host.scheduler.get_request("r0")
    assert request is not None
    assert request.output_token_ids[-6:].tolist() == [7] * 6
    assert (request.num_computed_tokens, request.num_tokens) == (11, 12)
    after = host.scheduler.stats()
    assert after.num_steps - before.num_steps == 6
    assert after.num_generated_tokens - before.num_generated_tokens == 12
    assert after.deferrals["sequence_limit"] - before.deferrals["sequence_limit"] == 6
    (run,) = listener.runs
    assert (run.num_steps, run.blocked_by) == (6, Reason.SEQUENCE_LIMIT)
    assert (run.block_rows.tolist(), run.block_steps.tolist()) == ([0, 1], [3, 3])
    assert host.schedule().step_id == run.first_step_id + 6


def test_advance_accepts_tokens_per_step_and_separate_last_tokens() -> None:
    host = decoding(1)
    host.scheduler.advance(ends(3), [[1], [2], [3]])
    host.now = 120.0
    host.scheduler.advance(ends(2, 103.0), [4], [5])
    host.now = 120.0
    request = host.scheduler.get_request("r0")
    assert request is not None
    assert request.output_token_ids[1:].tolist() == [1, 2, 3, 4, 5]


def test_a_request_may_stop_in_the_last_step_of_advance() -> None:
    host = Host()
    host.add("a", 4, max_tokens=20, eos_token_ids=[EOS])
    host.add("b", 4, max_tokens=4)
    host.step()
    update = host.scheduler.advance(ends(3), [1, 2], [EOS, 2])
    host.now = 120.0
    ends_of = [(request.request_id, request.finish_reason) for request in update.finished]
    assert ends_of == [("a", FinishReason.STOP), ("b", FinishReason.LENGTH)]
    assert host.schedule().finished == update.finished


def test_advance_reports_what_the_outputs_would_report() -> None:
    host = decoding()
    host.scheduler.abort("r1", 50.0)
    assert host.scheduler.is_id_in_use("r1")
    host.scheduler.advance(ends(1), [1])
    host.now = 120.0
    assert not host.scheduler.is_id_in_use("r1")
    assert host.schedule().finished == ()


def test_advance_may_append_more_tokens_than_the_recent_tokens_buffer() -> None:
    host = decoding(1, num_blocks=600, max_model_len=2300, block_size=4)
    host.add("long", 4, max_tokens=2200)
    host.step()
    host.scheduler.abort("r0", 50.0)
    tokens = np.arange(2000, dtype=np.int32)[:, None]
    host.scheduler.advance(np.arange(100.0, 2101.0), tokens)
    host.now = 2200.0
    request = host.scheduler.get_request("long")
    assert request is not None
    assert request.output_token_ids[1:].tolist() == tokens[:, 0].tolist()
    host.scheduler.check_invariants()


@pytest.mark.parametrize(
    ("times", "tokens", "last", "error", "message"),
    [
        (ends(20), [1, 1], None, StepOrderError, "times has 20 step\\(s\\), but only 19 are guaranteed"),
        ([100.0], [1, 1], None, StepOrderError, "times has 1 value"),
        (ends(2), [1], None, StepResultError, r"shape \(1,\); give \[2\] \(rows\) or \[2, 2\]"),
        (ends(2), [[1, 1]], None, StepResultError, r"shape \(1, 2\)"),
        (ends(2), [1, -1], None, StepResultError, "token id -1"),
        (ends(2), [1, 2**31], None, StepResultError, f"token id {2**31}"),
        (ends(2), [1.0, 1.0], None, StepResultError, "float64; it must be integers"),
        (ends(2), [1, 1], [1], StepResultError, r"last_token_ids has shape \(1,\)"),
        (ends(2), [1, EOS], None, StepResultError, "token 999 stops request 'b' before the last of 2 steps"),
        (ends(3), [[1, 1], [1, 998], [1, 1]], None, StepResultError, "token 998 stops request 'b' before"),
    ],
)
def test_invalid_advances_are_refused_and_change_nothing(
    times: Any, tokens: Any, last: Any, error: type[Exception], message: str
) -> None:
    host = Host(enable_prefix_caching=False)
    host.add("a", 4, max_tokens=20)
    host.add("b", 4, max_tokens=20, eos_token_ids=[EOS], stop_token_ids=[998])
    host.step()
    before = host.scheduler.stats()
    with pytest.raises(error, match=message):
        host.scheduler.advance(times, tokens, last)
    assert host.scheduler.stats() == before
    assert host.scheduler.guaranteed_steps() == 19


def test_advance_continues_after_a_stop_token_before_min_tokens() -> None:
    host = Host()
    host.add("a", 4, max_tokens=20, eos_token_ids=[EOS], min_tokens=6)
    host.step()
    with pytest.raises(StepResultError, match="before the last of 6"):
        host.scheduler.advance(ends(6), [EOS])
    update = host.scheduler.advance(ends(5), [EOS])
    host.now = 120.0
    assert [r.finish_reason for r in update.finished] == [FinishReason.STOP]


# ---------------------------------------------------------------------- recordings


def record() -> list[str]:
    """The lines of a run that advances."""
    file = io.StringIO()
    host = Host(recorder=Recorder(file))
    host.add("a", 4, max_tokens=12)
    host.add("b", 4, max_tokens=9, eos_token_ids=[EOS])
    host.step()
    host.scheduler.advance(ends(4), np.array([3, 4]), [3, EOS])
    host.now = 120.0
    host.step()
    host.scheduler.advance(np.array(ends(2, 200.0)), [[1], [2]])
    host.now = 120.0
    return file.getvalue().splitlines()


def test_a_recording_with_advance_replays() -> None:
    report = replay(record())
    assert (report.num_steps, report.num_requests) == (8, 2)


def test_a_replay_detects_an_altered_decision_of_advance() -> None:
    lines = record()
    number = next(index for index, line in enumerate(lines) if '"advance"' in line)
    assert '"block_steps":[0,0]' in lines[number]
    lines[number] = lines[number].replace('"block_steps":[0,0]', '"block_steps":[0,1]')
    with pytest.raises(ReplayDifference, match="block_steps"):
        replay(lines)
