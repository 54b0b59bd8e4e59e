"""Names of requests, of which clients may choose the same."""

from __future__ import annotations

from pointsman.server.service.names import RequestNames


def test_a_name_may_be_taken_twice() -> None:
    names = RequestNames()
    twins = [names.add("cmpl-a", "cmpl-a") for _ in range(50)]
    assert len(set(twins)) == 50 and names.find("cmpl-a") == twins
    assert {names.shown(one) for one in twins} == {"cmpl-a"}
    assert names.find(twins[7]) == [twins[7]]


def test_samples_are_found_by_their_answer_and_alone() -> None:
    names = RequestNames()
    first, second = names.add("x", "x-0"), names.add("x", "x-1")
    other = names.add("x-0", "x-0")
    assert names.find("x") == [first, second]
    assert names.find("x-1") == [second]
    assert names.find("x-0") == [first, other]


def test_what_has_ended_is_forgotten() -> None:
    names = RequestNames()
    one = names.add("x", "x")
    names.remove([one, "never"])
    assert names.find("x") == [] and names.find(one) == []
    assert names.shown(one) == one
