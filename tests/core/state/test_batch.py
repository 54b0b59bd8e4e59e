"""The batch: the filter for several stop tokens per request, and bulk writes to a slice of all running rows."""

from __future__ import annotations

import re

import numpy as np
import pytest

import pointsman.core.step.update as update_module
from pointsman.core import Request, RequestStatus, StepResult
from pointsman.core.kv import tables
from pointsman.core.state import batch
from pointsman.core.state.batch import STOP_FILTER_SIZE, Batch, StopFilter

from ..helpers import Host


def test_the_stop_filter_finds_every_stop_token() -> None:
    stops = StopFilter()
    stops.add({5, STOP_FILTER_SIZE + 7, 3})
    assert stops.may_stop(np.array([5, STOP_FILTER_SIZE + 7, 3, 4, 8])).tolist() == [True, True, True, False, False]
    assert stops.may_stop(np.array([7, STOP_FILTER_SIZE + 5])).all(), "the same low bits: to be tested exactly"


def test_stop_tokens_with_the_same_low_bits_are_counted_separately() -> None:
    stops = StopFilter()
    stops.add({5, STOP_FILTER_SIZE + 5})
    stops.add({5, 6})
    stops.remove({5, STOP_FILTER_SIZE + 5})
    assert stops.may_stop(np.array([5, 6])).all() and stops.num_rows == 1
    stops.remove({5, 6})
    assert not stops.counts.any() and stops.num_rows == 0


def test_the_stop_filter_ignores_a_single_stop_token() -> None:
    stops = StopFilter()
    stops.add({5})
    stops.add(())
    assert stops.num_rows == 0 and not stops.counts.any()


def test_a_stop_token_finishes_only_requests_that_have_it() -> None:
    host = Host()
    first = host.add("a", eos_token_ids=(7, 8))
    second = host.add("b", eos_token_ids=(9, STOP_FILTER_SIZE + 7))
    third = host.add("c", eos_token_ids=(7,))
    host.step({"a": 9, "b": 7, "c": 8})
    assert not (first.is_finished or second.is_finished or third.is_finished)
    host.step({"a": 8, "b": STOP_FILTER_SIZE + 7, "c": 7})
    assert {first.status, second.status, third.status} == {RequestStatus.FINISHED_STOPPED}
    host.scheduler.check_invariants()


def test_a_released_row_removes_its_stop_tokens() -> None:
    host = Host()
    host.add("a", eos_token_ids=(7, 8))
    kept = host.add("b", eos_token_ids=(7, 6))
    host.step({"a": 1, "b": 1})
    host.park("a")
    host.scheduler.check_invariants()
    host.ready("a")
    host.step({"b": 2})
    host.step({"a": 8, "b": 8})
    assert not kept.is_finished
    host.scheduler.check_invariants()


def test_only_rows_whose_token_may_be_a_stop_token_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(max_num_seqs=8)
    for number in range(8):
        host.add(f"r{number}", [number], eos_token_ids=(100, 101, 102), max_tokens=50)
    host.step()
    seen: list[tuple[str, int]] = []
    real = update_module.stop_condition

    def count(request: Request, num_tokens: int, token_id: int) -> object:
        seen.append((request.request_id, token_id))
        return real(request, num_tokens, token_id)

    monkeypatch.setattr(update_module, "stop_condition", count)
    for _ in range(5):
        host.step(dict.fromkeys((f"r{number}" for number in range(8)), 3))
    assert not seen
    host.step({f"r{number}": 101 if number == 4 else 3 for number in range(8)})
    assert seen == [("r4", 101)]


# ------------------------------------------------------------------ all running rows as a slice


def run_random_steps(monkeypatch: pytest.MonkeyPatch, max_steps_in_flight: int, **constants: int) -> list[object]:
    """Outputs and updates while requests of different lengths arrive, are preempted, aborted and finished."""
    monkeypatch.setattr(batch, "SPANNED_FROM", constants["spanned_from"])
    monkeypatch.setattr(tables, "MAX_LOOP_ROWS", constants["max_loop_rows"])
    sizes = {"num_blocks": 40, "max_num_seqs": 12, "max_num_batched_tokens": 40}
    host = Host(**sizes, max_steps_in_flight=max_steps_in_flight)
    found: list[object] = []
    in_flight = []
    for number in range(130):
        if number < 90:
            host.add(f"r{number}", 2 + number % 7, max_tokens=3 + number * number % 23)
        if number % 11 == 10:
            host.abort(f"r{number - 7}")
        output = host.schedule()
        fields = (
            output.rows,
            output.num_computed_tokens,
            output.num_scheduled_tokens,
            output.samples,
            output.block_ids,
        )
        found.append([field.tolist() for field in fields])
        in_flight.append(output)
        if len(in_flight) == max_steps_in_flight:
            tokens = np.arange(int(in_flight[0].samples.sum())) + 7 * number
            update = host.scheduler.update(in_flight[0], StepResult(tokens), host.now)
            host.scheduler.check_invariants()
            found.append((update.token_ids.tolist(), [request.request_id for request in update.finished]))
            in_flight.pop(0)
    assert host.scheduler.stats().num_preemptions > 5
    return found


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_decisions_are_the_same_with_bulk_writes_and_row_loops(
    monkeypatch: pytest.MonkeyPatch, max_steps_in_flight: int
) -> None:
    at_once = run_random_steps(monkeypatch, max_steps_in_flight, spanned_from=1, max_loop_rows=0)
    assert at_once == run_random_steps(monkeypatch, max_steps_in_flight, spanned_from=1000, max_loop_rows=1000)


def test_running_rows_get_a_slice_unless_most_of_its_rows_are_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SPANNED_FROM", 2)
    host = Host(num_blocks=64, max_num_seqs=12, max_num_batched_tokens=64)
    for number in range(12):
        host.add(f"r{number}")
    host.step()
    members = host.scheduler._batch.members
    assert members.span is not None
    assert members.span.stop == max(members.rows) + 1 == 12
    for number in range(10):
        host.abort(f"r{number}")
    assert host.scheduler._batch.members.rows.tolist() == [10, 11]
    assert host.scheduler._batch.members.span is None
    host.step()
    host.abort("r10")
    assert host.scheduler._batch.members.span is None, "one row is too few"


def test_batch_docstring_lists_every_column() -> None:
    """The docstring lists the columns in the order in which they are created, with their types."""
    listed = re.findall(r"^    (\w+) +(u?int\d+) \[R", batch.__doc__ or "", re.MULTILINE)
    columns = Batch(block_size=4, accepted_drafts=[0])
    assert listed == [(name, str(getattr(columns, name).dtype)) for name in batch._COLUMNS]
