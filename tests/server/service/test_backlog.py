"""Backlog: its limits, and the refusals beyond them."""

from __future__ import annotations

import pytest

from pointsman.server.service.backlog import Backlog, Ticket
from pointsman.server.stages import MAX_WAIT, PROMPT_TOKENS, REQUESTS
from pointsman.server.wire.errors import ApiError
from tests.server.limits import backlog as backlog_of
from tests.server.limits import stage_limit


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def refused(backlog: Backlog, num_requests: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        backlog.enter("", num_requests)
    return caught.value


def test_open_requests_are_limited_until_they_finish() -> None:
    backlog = backlog_of(3)
    with backlog.enter("", 2):
        with backlog.enter("", 1):
            error = refused(backlog)
            assert error.status_code == 429 and error.reason == "queue_requests"
            assert error.headers is not None and int(error.headers["retry-after"]) >= 1
        with backlog.enter("", 1):
            pass
    assert backlog.requests.total == 0


def test_request_larger_than_the_whole_limit_gets_400() -> None:
    error = refused(backlog_of(3), 4)
    assert error.status_code == 400 and "3" in error.detail


def test_exception_removes_the_request_from_the_backlog() -> None:
    backlog = backlog_of(1, 10)
    for _ in range(2):
        with pytest.raises(RuntimeError), backlog.enter("", 1) as ticket:
            ticket.add_prompts([10])
            raise RuntimeError
    assert (backlog.requests.total, backlog.num_waiting, backlog.prompt_tokens.total) == (0, 0, 0)


def test_prompt_tokens_are_counted_until_the_first_token() -> None:
    backlog = backlog_of(10, 100)
    with backlog.enter("", 1) as first, backlog.enter("", 1) as second:
        first.add_prompts([60])
        with pytest.raises(ApiError) as caught:
            second.add_prompts([41])
        assert caught.value.status_code == 429 and caught.value.reason == "queue_tokens"
        assert (backlog.num_waiting, backlog.prompt_tokens.total) == (1, 60)  # what was refused is not counted
        first.note_first_token(0)
        second.add_prompts([41])
        assert backlog.prompt_tokens.total == 41


def test_prompt_of_any_length_is_accepted_if_no_other_waits() -> None:
    backlog = backlog_of(10, 100)
    with backlog.enter("", 3) as ticket, backlog.enter("", 1) as other:
        ticket.add_prompts([500] * 3)
        with pytest.raises(ApiError):
            other.add_prompts([1])
    with backlog.enter("", 1) as alone:
        alone.add_prompts([10**6])


def test_prompt_with_several_samples_counts_once() -> None:
    backlog = backlog_of(10, 100)
    with backlog.enter("", 3) as ticket:
        ticket.add_prompts([90])
        for _ in range(3):
            ticket.note_first_token(0)
        assert (backlog.num_waiting, backlog.prompt_tokens.total) == (0, 0)


def fill(backlog: Backlog, number: int) -> list[Ticket]:
    tickets = [backlog.enter("", 1).__enter__() for _ in range(number)]
    for ticket in tickets:
        ticket.add_prompts([1])
    return tickets


def test_retry_after_is_estimated_from_the_rate_of_first_tokens() -> None:
    clock = Clock()
    backlog = Backlog(stage_limit(REQUESTS, 1000), stage_limit(PROMPT_TOKENS, None), clock)
    tickets = fill(backlog, 110)
    for ticket in tickets[:10]:  # two a second
        clock.now += 0.5
        ticket.note_first_token(0)
    assert backlog.num_waiting == 100
    assert 40 <= backlog.retry_after("") <= 50
    clock.now += 31  # no more events: the old rate is not used any more
    assert 31 <= backlog.retry_after("") <= MAX_WAIT


def test_retry_after_has_a_minimum_and_a_maximum() -> None:
    clock = Clock()
    backlog = Backlog(stage_limit(REQUESTS, 10**6), stage_limit(PROMPT_TOKENS, None), clock)
    assert backlog.retry_after("") == 1
    tickets = fill(backlog, 1000)
    assert backlog.retry_after("") == 1
    clock.now += 1
    tickets[0].note_first_token(0)
    clock.now += 20
    assert backlog.retry_after("") == MAX_WAIT


def test_refusal_states_the_open_requests_and_the_additional_ones() -> None:
    backlog = backlog_of(10)
    with backlog.enter("", 8), pytest.raises(ApiError) as caught:
        backlog.enter("", 3)
    assert "8 requests are open, this request would add 3, and the limit is 10" in caught.value.detail


# ------------------------------------------------------------------------------------------------- tenants


def test_backlog_of_one_tenant_does_not_block_others() -> None:
    backlog = backlog_of(100, 1000, is_shared=True)
    taken = 0
    with pytest.raises(ApiError, match="of this tenant are open") as caught:
        while True:
            backlog.enter("a", 1).add_prompts([1])
            taken += 1
    assert taken == 75 and caught.value.reason == "queue_requests"
    for _ in range(15):
        backlog.enter("b", 1).add_prompts([1])


def test_waiting_tokens_of_one_tenant_do_not_block_others() -> None:
    backlog = backlog_of(100, 1000, is_shared=True)
    backlog.enter("a", 1).add_prompts([700])
    with pytest.raises(ApiError, match="700 prompt tokens of this tenant wait") as caught:
        backlog.enter("a", 1).add_prompts([100])
    assert caught.value.reason == "queue_tokens"
    backlog.enter("b", 1).add_prompts([300])


def test_retry_after_depends_on_the_tenants_own_backlog() -> None:
    clock = Clock()
    backlog = Backlog(stage_limit(REQUESTS, 1000), stage_limit(PROMPT_TOKENS, None), clock)
    tickets = fill(backlog, 110)
    other = backlog.enter("b", 1)
    other.add_prompts([1])
    for ticket in tickets[:10]:  # two a second
        clock.now += 0.5
        ticket.note_first_token(0)
    assert backlog.retry_after("b") == 1 and backlog.retry_after("") >= 40


def test_prompt_longer_than_the_limit_releases_only_counted_tokens() -> None:
    backlog = backlog_of(10, 100)
    with backlog.enter("", 1) as ticket:
        ticket.add_prompts([500, 30, 40])
        assert backlog.prompt_tokens.total == 100
        ticket.note_first_token(0)
        assert backlog.prompt_tokens.total == 70
        ticket.note_first_token(2)
        ticket.note_first_token(2)
        assert backlog.prompt_tokens.total == 30
    assert backlog.prompt_tokens.total == backlog.num_waiting == 0
