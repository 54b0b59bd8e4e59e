"""The search behind a request that lacks blocks: which requests are looked up again, and why other requests wait."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import Reason
from tests.core.helpers import Host, names


def crowded_host(**config: Any) -> Host:
    """Of 24 blocks of 4 tokens "first" holds 10 and "second" 10; "head" needs 15, and three others 6 each."""
    host = Host(
        **{"reserves": ("bypass",), "num_blocks": 24, "max_num_batched_tokens": 500, "max_num_seqs": 9, **config}
    )
    host.add("first", 37, max_tokens=20)
    host.add("second", 37, max_tokens=20)
    host.step()
    host.add("head", 57, max_tokens=2)
    for index in range(3):
        host.add(f"other {index}", 21 + index, max_tokens=2)
    host.step()
    return host


def looked_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that are looked up in the prefix cache from now on."""
    found: list[str] = []
    kv = host.scheduler._kv
    look_up = kv.look_up

    def noting(request: Any) -> Any:
        found.append(request.request_id)
        return look_up(request)

    monkeypatch.setattr(kv, "look_up", noting)
    return found


def test_after_an_arrival_only_the_new_request_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    host = crowded_host()
    found = looked_up(host, monkeypatch)
    host.add("new", 25)
    assert not names(host.step().admitted)
    assert found == ["new"]
    assert [host.explain(name).reason for name in ("other 2", "new")] == [Reason.BLOCKS, Reason.BLOCKS]


def test_freed_blocks_cause_lookups_only_of_requests_that_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    host = crowded_host(reserves=("bypass:kept=0",))
    found = looked_up(host, monkeypatch)
    host.abort("first")
    admitted = names(host.step().admitted)
    assert admitted == ["other 0", "other 1"]
    assert set(found) == {"other 0", "other 1"}
    assert host.explain("other 2").missing == 6 - host.stats().num_free_blocks


def test_an_explanation_has_the_missing_blocks_of_the_newest_step() -> None:
    host = crowded_host()
    before = host.explain("other 1").missing
    free = host.stats().num_free_blocks
    while host.stats().num_free_blocks == free:  # until "first" or "second" grows
        output = host.schedule()
        found, now_free = host.explain("other 1").missing, host.stats().num_free_blocks
        host.update(output)
    assert found == before + free - now_free


def test_a_request_fits_once_another_one_holds_its_prefix() -> None:
    """The request needs 9 blocks, and "sharer" holds 4 of these blocks once it runs. Then 3 are free, 6 with those of
    "small"."""
    host = Host(reserves=("bypass:kept=0",), num_blocks=27, max_num_batched_tokens=500, max_num_seqs=9)
    shared = list(range(16))
    host.add("first", 60, max_tokens=4)
    host.add("small", 9, max_tokens=4)
    host.step()
    host.add("head", 57, max_tokens=2)
    host.add("other", [*shared, *range(100, 118)], max_tokens=2)
    host.step()
    assert host.explain("other").missing == 1
    host.add("sharer", [*shared, 200], max_tokens=9)
    assert names(host.step().admitted) == ["sharer"]
    host.abort("small")
    assert names(host.step().admitted) == ["other"]


def test_missing_blocks_of_the_blocker_are_current_after_aborts() -> None:
    """ "head" has reached its bound of bypasses; "urgent", before it, is skipped."""
    host = Host(
        order="priority", reserves=("bypass:bound=1,kept=0",), num_blocks=24, max_num_batched_tokens=500, max_num_seqs=9
    )
    host.add("first", 37, max_tokens=9)
    host.add("second", 37, max_tokens=20)
    host.step()
    host.add("head", 57, max_tokens=2, priority=1)
    host.add("short", 3, max_tokens=1, priority=1)
    assert names(host.step().admitted) == ["short"]
    host.add("urgent", 60, max_tokens=2)
    host.step()
    host.abort("urgent")
    host.abort("first")
    host.step()
    assert host.explain("head").reason is Reason.BLOCKS
    assert host.explain("head").missing == 15 - host.stats().num_free_blocks


@pytest.mark.parametrize("event", ["head leaves", "step fails"])
def test_missing_blocks_of_a_request_stay_known_until_the_next_step(event: str) -> None:
    host = crowded_host()
    free = host.stats().num_free_blocks
    output = host.schedule()
    while host.stats().num_free_blocks == free:  # the reason stays, so the new number is not noted
        host.update(output)
        output = host.schedule()
    names_behind = [f"other {index}" for index in range(3)]
    lacked = [host.explain(name).missing for name in names_behind]
    if event == "step fails":
        host.fail(output)
    else:
        host.abort("head")
    assert [host.explain(name).missing for name in names_behind] == lacked
