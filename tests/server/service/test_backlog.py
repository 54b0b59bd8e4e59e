"""How much may wait, and what the others are told."""

from __future__ import annotations

import pytest

from pointsman.server.service.backlog import MAX_WAIT, Backlog, Ticket
from pointsman.server.wire.errors import ApiError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(backlog: Backlog, num_requests: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        backlog.enter(num_requests)
    return caught.value


def test_requests_are_bounded_and_leave_room_when_they_end() -> None:
    backlog = Backlog(3)
    with backlog.enter(2):
        with backlog.enter(1):
            error = refused(backlog)
            assert error.status_code == 429 and error.reason == "queue_requests"
            assert error.headers is not None and int(error.headers["retry-after"]) >= 1
        with backlog.enter(1):
            pass
    assert backlog.num_requests == 0


def test_more_than_ever_fits_is_no_overload() -> None:
    error = refused(Backlog(3), 4)
    assert error.status_code == 400 and "3" in error.detail


def test_an_error_inside_leaves_room() -> None:
    backlog = Backlog(1, 10)
    for _ in range(2):
        with pytest.raises(RuntimeError), backlog.enter(1) as ticket:
            ticket.add_prompt(0, 10)
            raise RuntimeError
    assert (backlog.num_requests, backlog.num_waiting, backlog.num_prompt_tokens) == (0, 0, 0)


def test_prompt_tokens_wait_until_the_first_token() -> None:
    backlog = Backlog(10, 100)
    with backlog.enter(1) as first, backlog.enter(1) as second:
        first.add_prompt(0, 60)
        with pytest.raises(ApiError) as caught:
            second.add_prompt(0, 41)
        assert caught.value.status_code == 429 and caught.value.reason == "queue_tokens"
        assert (backlog.num_waiting, backlog.num_prompt_tokens) == (1, 60)  # what was refused is not counted
        first.first_token(0)
        second.add_prompt(0, 41)
        assert backlog.num_prompt_tokens == 41


def test_one_request_alone_is_always_let_in() -> None:
    backlog = Backlog(10, 100)
    with backlog.enter(3) as ticket, backlog.enter(1) as other:
        for prompt in range(3):
            ticket.add_prompt(prompt, 500)
        with pytest.raises(ApiError):
            other.add_prompt(0, 1)
    with backlog.enter(1) as alone:
        alone.add_prompt(0, 10**6)


def test_samples_of_one_prompt_count_it_once() -> None:
    backlog = Backlog(10, 100)
    with backlog.enter(3) as ticket:
        ticket.add_prompt(0, 90)
        for _ in range(3):
            ticket.first_token(0)
        assert (backlog.num_waiting, backlog.num_prompt_tokens) == (0, 0)


def fill(backlog: Backlog, number: int) -> list[Ticket]:
    tickets = [backlog.enter(1).__enter__() for _ in range(number)]
    for ticket in tickets:
        ticket.add_prompt(0, 1)
    return tickets


def test_the_wait_is_estimated_from_the_rate_of_first_tokens() -> None:
    clock = Clock()
    backlog = Backlog(1000, clock=clock)
    tickets = fill(backlog, 110)
    for ticket in tickets[:10]:  # two a second
        clock.now += 0.5
        ticket.first_token(0)
    assert backlog.num_waiting == 100
    assert 40 <= backlog.retry_after() <= 50
    clock.now += 31  # nothing more happened: that rate says nothing any more
    assert 31 <= backlog.retry_after() <= MAX_WAIT


def test_the_wait_is_bounded_both_ways() -> None:
    clock = Clock()
    backlog = Backlog(10**6, clock=clock)
    assert backlog.retry_after() == 1
    tickets = fill(backlog, 1000)
    assert backlog.retry_after() == 1
    clock.now += 1
    tickets[0].first_token(0)
    clock.now += 20
    assert backlog.retry_after() == MAX_WAIT


def test_a_refusal_says_how_many_more_it_would_be() -> None:
    backlog = Backlog(10)
    with backlog.enter(8), pytest.raises(ApiError) as caught:
        backlog.enter(3)
    assert "8 requests are open, this would be 3 more, and at most 10 may be" in caught.value.detail
