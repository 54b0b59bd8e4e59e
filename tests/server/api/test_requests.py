"""The JSON of a request for operators, from the engine's explanation."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pointsman.core.policy.victim import Latest
from pointsman.server.api.requests import describe
from pointsman.server.wire.questions import RequestExplanation
from pointsman.server.wire.responses import RequestState
from tests.core.helpers import Host


def explained(host: Host, request_id: str, age: float) -> RequestExplanation:
    request = host.scheduler.get_request(request_id)
    assert request is not None
    return RequestExplanation(
        explanation=host.explain(request_id),
        arrival_time=request.arrival_time,
        age=age,
        tenant=request.tenant,
        user=None,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        ttft_target=request.ttft_target,
        retention=request.retention,
        deadline_in=None,
        waiting_for=None,
    )


def test_request_events_are_in_unix_time() -> None:
    host = Host(log_request_events=True)
    host.add("a")  # at 1 of the engine's clock
    host.step()  # at 2 and 3
    state = RequestState.model_validate(describe(explained(host, "a", age=9.0), str))
    assert [event.event for event in state.events] == ["queued", "scheduled", "first_token"]
    assert [time.time() - event.at for event in state.events] == pytest.approx([9.0, 8.0, 7.0], abs=0.5)


def test_without_request_log_events_are_empty() -> None:
    host = Host()
    host.add("a")
    host.step()
    assert describe(explained(host, "a", age=1.0), str)["events"] == []


def test_blocking_requests_are_shown_by_their_client_visible_ids() -> None:
    host = Host(max_num_seqs=1)
    host.add("internal-1")
    host.add("internal-2")
    host.step()
    known = explained(host, "internal-2", age=1.0)
    state = RequestState.model_validate(describe(known, lambda name: name.replace("internal", "mine")))
    assert (state.id, state.blocker, state.resource, state.missing) == ("mine-2", "mine-1", "sequence slots", 1)
    assert [(holder.id, holder.amount) for holder in state.holders] == [("mine-1", 1)] and state.num_holders == 1
    assert (
        state.explanation == "mine-2 waits for 1 more sequence slot: all sequence slots are taken. Held by mine-1 (1)."
    )


def test_only_operators_see_explanations_that_name_tenants() -> None:
    host = Host(max_num_seqs=1, order="fair")
    host.add("a", 8, tenant="x")
    host.step()
    host.add("b", tenant="y")
    host.add("c", tenant="x")
    host.step()
    known = explained(host, "c", age=1.0)
    words = known.explanation.policy_words
    assert words.startswith(" fair: tenant x has had ") and words.endswith(" tokens more than tenant y.")
    plain = "c waits behind b, which waits: all sequence slots are taken."
    assert describe(known, str)["explanation"] == plain + words
    assert describe(known, str, sees_tenants=False)["explanation"] == plain


def test_only_operators_see_replaced_policies() -> None:
    class Odd(Latest):
        name = "odd"

        def attach(self, view: Any) -> None:
            raise KeyError("tenant x")

    host = Host(victim=Odd())
    host.add("a", 8)
    known = explained(host, "a", age=1.0)
    plain = "a has not been tried in a step yet."
    told = describe(known, str)
    assert told["explanation"] == plain + known.explanation.policy_words != plain
    assert told["replaced_policies"] == [
        {"kind": "victim", "policy": "odd", "by": "latest", "error": "attach raised KeyError: 'tenant x'"}
    ]
    assert RequestState(**told).replaced_policies[0].by == "latest"
    told = describe(known, str, sees_tenants=False)
    assert (told["explanation"], told["replaced_policies"]) == (plain, [])
