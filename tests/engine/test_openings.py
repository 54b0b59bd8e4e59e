"""Two threads that take turns: nothing is said too late to matter, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from pointsman.engine.openings import Openings
from pointsman.engine.worker import Worker

PATIENCE = 10.0


class Gates:
    """A worker whose functions stop where they are told to."""

    def __init__(self) -> None:
        self.openings = Openings()
        self.worker = Worker("test-openings", self.openings)

    def submit(self, name: str, *gates: threading.Event, failing: bool = False) -> Future[str]:
        """A function that announces something behind each gate, and ends with the last announcement."""

        def function() -> str:
            for gate in gates:
                assert gate.wait(PATIENCE)
                self.openings.announce()
            if failing:
                raise MemoryError(name)
            return name

        return self.worker.submit(function)


@pytest.fixture
def gates() -> Iterator[Gates]:
    made = Gates()
    yield made
    made.worker.close()


def events(count: int) -> list[threading.Event]:
    return [threading.Event() for _ in range(count)]


def wait_behind_the_first(openings: Openings) -> threading.Thread:
    """A thread that waits, once the first opening has come."""
    deadline = time.monotonic() + PATIENCE
    while openings._count == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    thread = threading.Thread(target=openings.wait, daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread


def test_an_answer_waits_for_the_first_opening_of_the_next_function(gates: Gates) -> None:
    hold, opening = events(2)
    first = gates.submit("first", hold)
    second = gates.submit("second", opening)
    hold.set()
    with pytest.raises(TimeoutError):
        first.result(0.1)
    opening.set()
    assert first.result(PATIENCE) == "first"
    assert second.result(PATIENCE) == "second", "nothing follows it"


def test_a_function_that_announces_nothing_gives_the_answer_before_it_when_it_ends(gates: Gates) -> None:
    hold = threading.Event()
    first, silent, last = gates.submit("first", hold), gates.submit("silent"), gates.submit("last")
    hold.set()
    assert [future.result(PATIENCE) for future in (first, silent, last)] == ["first", "silent", "last"]


def test_answers_come_in_order_when_one_fails(gates: Gates) -> None:
    hold, order = threading.Event(), []
    futures = [gates.submit("a", hold), gates.submit("b", failing=True), gates.submit("c")]
    for name, future in zip("abc", futures, strict=True):
        future.add_done_callback(lambda _, name=name: order.append(name))
    hold.set()
    assert isinstance(futures[1].exception(PATIENCE), MemoryError)
    assert futures[2].result(PATIENCE) == "c"
    assert order == ["a", "b", "c"]


def test_an_answer_is_given_when_what_follows_it_is_cancelled(gates: Gates) -> None:
    hold = threading.Event()
    first, second = gates.submit("first", hold), gates.submit("second")
    assert second.cancel()
    hold.set()
    assert first.result(PATIENCE) == "first"


def test_an_answer_is_given_when_the_worker_is_closed(gates: Gates) -> None:
    hold = threading.Event()
    first = gates.submit("first", hold)
    threading.Timer(0.05, hold.set).start()
    gates.worker.close()
    assert first.result(0) == "first"


def test_waits_from_the_first_opening_to_the_second(gates: Gates) -> None:
    gates.openings.wait()  # nothing is computed
    start, first, second, end = events(4)
    future = gates.submit("a", start, first, second, end)
    gates.openings.wait()  # it has not come to its first
    start.set()
    waiting = wait_behind_the_first(gates.openings)
    first.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    gates.openings.wait()  # it is past its second
    second.set()
    end.set()
    assert future.result(PATIENCE) == "a"


@pytest.mark.parametrize("failing", [False, True])
def test_the_end_of_a_function_lets_in(gates: Gates, failing: bool) -> None:
    start, end = events(2)

    def function() -> None:
        assert start.wait(PATIENCE)
        gates.openings.announce()
        assert end.wait(PATIENCE)
        if failing:
            raise MemoryError

    gates.worker.submit(function)
    start.set()
    waiting = wait_behind_the_first(gates.openings)
    end.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_nobody_waits_for_ever() -> None:
    """Thousands of steps that announce as they like, and another thread that waits as often as it can."""
    openings = Openings()
    worker = Worker("test-openings", openings)
    futures = [worker.submit(lambda n=number: [openings.announce() for _ in range(n % 5)]) for number in range(5000)]
    for future in futures:
        while not future.done():
            openings.wait()
        future.result(0)
    worker.close()
