"""The protocol of gates: a deferral stays a deferral for the guaranteed steps of its gate."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import Adapter, Reason, Request
from pointsman.core.policy.gate import Gate

from ..helpers import Host

CASES: dict[str, tuple[Reason, dict[str, Any], dict[str, Any]]] = {
    "adapters": (Reason.ADAPTER_SLOTS, {"max_loras": 1}, {"adapter": Adapter("second")}),
    "reserves": (Reason.FULL_SEQUENCE, {"num_blocks": 12}, {}),
}


def gate_of(host: Host, name: str) -> Gate:
    gates = host.scheduler._parts.gates
    gate = {"adapters": gates.adapters, "reserves": gates.reserves, "encoder": host.scheduler._encoder}[name]
    assert gate is not None and gate in gates.all
    return gate


def test_gates_are_checked_in_a_fixed_order() -> None:
    host = Host(max_num_partial_prefills=2, long_prefill_token_threshold=8, encoder_budget=4, encoder_cache_size=4)
    kinds = [type(gate).__name__ for gate in host.scheduler._parts.gates.all]
    assert kinds == [
        "AdapterSlots",
        "TokenBudget",
        "LongPrefillThreshold",
        "EncoderCache",
        "PartialPrefills",
        "Reserves",
    ]


@pytest.mark.parametrize("name", ["adapters", "reserves"])
def test_a_deferral_stays_for_its_guaranteed_steps(name: str) -> None:
    reason, config, fields = CASES[name]
    host = Host(**{"max_model_len": 48, "num_blocks": 16, **config})
    first = {"adapter": Adapter("first")} if name == "adapters" else {}
    host.add("a", 12, max_tokens=24, **first)
    host.step()
    host.add("b", 36 if name == "reserves" else 12, max_tokens=4, **fields)
    host.step()
    assert host.explain("b").reason is reason
    guaranteed_steps = gate_of(host, name).guaranteed_steps(10)
    assert guaranteed_steps == 10
    for _ in range(guaranteed_steps):
        output = host.step()
        assert [request.request_id for request in output.requests] == ["a"]
        assert host.explain("b").reason is reason


def test_the_encoder_budget_guarantees_no_step() -> None:
    assert gate_of(Host(encoder_budget=8, encoder_cache_size=8), "encoder").guaranteed_steps(10) == 0


def test_the_base_gate_admits_every_request() -> None:
    host = Host()
    request = Request("a", [1, 2, 3], arrival_time=0.0, max_tokens=1)
    assert Gate().check(request, 1, 2, host.scheduler._admission._view) == 2
