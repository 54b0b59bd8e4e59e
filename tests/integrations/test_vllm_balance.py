"""The simulator's rule among data parallel engines, beside vLLM's own client."""

from __future__ import annotations

from tests.forms import seeds
from tests.integrations.vllm_process import NEEDS_VLLM, compared

pytestmark = NEEDS_VLLM


def test_the_simulator_balances_as_the_client_of_vllm() -> None:
    tally = compared("vllm_balance.py", seeds(20, 400))
    assert tally["published"] > tally["chosen"] / 10
    assert tally["engines chosen again"] > tally["chosen"] / 50
