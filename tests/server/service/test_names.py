"""Names of requests; clients may choose the same name twice."""

from __future__ import annotations

from pointsman.server.service.names import HIDDEN, RequestNames


def test_two_requests_may_have_the_same_client_visible_id() -> None:
    names = RequestNames()
    twins = [names.add("cmpl-a", "cmpl-a") for _ in range(50)]
    assert len(set(twins)) == 50 and names.find("cmpl-a") == twins
    assert {names.visible_name(one) for one in twins} == {"cmpl-a"}
    assert names.find(twins[7]) == [twins[7]]


def test_samples_are_found_by_response_id_and_own_id() -> None:
    names = RequestNames()
    first, second = names.add("x", "x-0"), names.add("x", "x-1")
    other = names.add("x-0", "x-0")
    assert names.find("x") == [first, second]
    assert names.find("x-1") == [second]
    assert names.find("x-0") == [first, other]


def test_finished_requests_are_forgotten() -> None:
    names = RequestNames()
    one = names.add("x", "x")
    names.remove([one, "never"])
    assert names.find("x") == [] and names.find(one) == []
    assert names.visible_name(one) == one


def test_client_finds_only_its_own_requests_and_operator_finds_all() -> None:
    names = RequestNames()
    of_a, of_b, of_operator = names.add("x", "x", 0), names.add("x", "x", 1), names.add("x", "x")
    assert names.find("x") == [of_a, of_b, of_operator]
    assert names.find("x", 0) == [of_a] and names.find("x", 1) == [of_b] and names.find("x", 2) == []
    assert names.find(of_b, 1) == [of_b] and names.find(of_b, 0) == [] and names.find(of_operator, 0) == []
    assert [names.visible_name(one, 0) for one in (of_a, of_b, of_operator, "gone")] == ["x", HIDDEN, HIDDEN, HIDDEN]
    assert names.visible_name(of_b) == "x" and names.visible_name("gone") == "gone"
