"""KV from a connector: loads before a step and between steps, their outcomes, saves and sends."""

from __future__ import annotations

import pytest

from pointsman.core import (
    ConfigError,
    FinishReason,
    InvalidTransition,
    Reason,
    RequestStatus,
    Scheduler,
    UnknownTransfer,
)
from pointsman.core.kv.digests import block_keys
from tests.core.helpers import blocks_of, connected, names, reference_output, small_config, tokens_of


def test_tokens_loaded_before_the_step_are_not_computed() -> None:
    host, connector = connected()
    connector.offers["a"] = (8, False)
    request = host.add("a", 12, max_tokens=3)
    output = host.step()
    (load,) = output.loads
    assert (load.request, load.is_async, load.first_token, load.num_tokens) == (request, False, 0, 8)
    assert load.block_ids.tolist() == blocks_of(output, "a")[:2]
    assert tokens_of(output) == {"a": 4}
    assert (output.num_cached_tokens.tolist(), output.num_external_tokens.tolist()) == ([8], [8])
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)


@pytest.mark.parametrize(("offered", "loaded"), [(3, 0), (7, 4), (12, 8), (400, 8)])
def test_a_load_fills_whole_blocks_and_leaves_one_token_to_compute(offered: int, loaded: int) -> None:
    host, connector = connected()
    connector.offers["a"] = (offered, False)
    host.add("a", 12)
    assert sum(load.num_tokens for load in host.step().loads) == loaded


def test_an_asynchronous_load_parks_its_request_until_it_is_done() -> None:
    host, connector = connected()
    connector.offers["a"] = (8, True)
    request = host.add("a", 12, max_tokens=2)
    host.add("b", 4)
    output = host.step()
    (load,) = output.loads
    assert names(output.requests) == ["b"], "others are admitted meanwhile"
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    explained = host.explain("a")
    assert (explained.reason, explained.transfer, explained.since) == (Reason.KV_LOAD, load.transfer_id, host.now - 1)
    with pytest.raises(InvalidTransition, match="report the end of this transfer with transfer_done"):
        host.ready("a")
    assert host.transfer_done(load.transfer_id) is None
    output = host.step()
    assert tokens_of(output) == {"b": 1, "a": 4}
    assert blocks_of(output, "a")[:2] == load.block_ids.tolist()
    assert connector.asked.count("a") == 1, "it is not looked up again"


def test_tokens_after_a_block_that_failed_to_load_are_computed() -> None:
    host, connector = connected()
    connector.offers["a"] = (12, True)
    request = host.add("a", 16, max_tokens=2)
    (load,) = host.step().loads
    host.transfer_done(load.transfer_id, failed_blocks=[int(load.block_ids[1])])
    assert tokens_of(host.step()) == {"a": 12}
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)
    assert host.stats().num_failed_loads == 1


def test_a_failed_load_finishes_its_request_with_failure_policy_fail() -> None:
    host, connector = connected(kv_load_failure_policy="fail")
    connector.offers["a"] = (8, True)
    request = host.add("a", 12)
    (load,) = host.step().loads
    assert host.transfer_done(load.transfer_id, num_loaded_tokens=4) is request
    assert (request.finish_reason, request.finish_detail) == (FinishReason.ERROR, "1 of 2 KV blocks could be loaded")
    assert host.stats().num_free_blocks == 16


def test_blocks_of_an_aborted_load_are_held_until_the_device_is_done() -> None:
    host, connector = connected()
    connector.offers["a"] = (8, True)
    host.add("a", 12)
    (load,) = host.step().loads
    host.abort("a")
    assert not host.scheduler.has_unfinished_requests()
    assert host.stats().num_free_blocks == 14
    host.transfer_done(load.transfer_id)
    assert host.stats().num_free_blocks == 16
    with pytest.raises(UnknownTransfer, match="call transfer_done exactly once"):
        host.transfer_done(load.transfer_id)


def test_blocks_of_a_load_that_timed_out_stay_held() -> None:
    host, connector = connected(kv_load_timeout=5.0)
    connector.offers["a"] = (8, True)
    host.add("a", 12)
    host.step()
    host.now += 10
    assert tokens_of(host.step()) == {"a": 12}, "it computes its prompt"
    assert host.stats().num_free_blocks == 16 - 2 - 3


def test_loads_leave_blocks_for_one_request_of_full_length() -> None:
    host, connector = connected()
    for name in ("a", "b", "c"):
        connector.offers[name] = (16, True)
        host.add(name, 20)
    output = host.step()
    assert names(load.request for load in output.loads) == ["a", "b"]
    assert host.explain("c").reason is Reason.KV_ROOM
    host.transfer_done(output.loads[0].transfer_id)
    output = host.step()
    assert names(output.admitted) == ["a"], "the first to be loaded is the first to run"
    assert names(load.request for load in output.loads) == ["c"]


def test_a_request_is_skipped_until_its_connector_answers() -> None:
    host, connector = connected()
    connector.offers["a"] = (None, False)
    host.add("a", 8)
    host.add("b", 4)
    assert names(host.step().admitted) == ["b"]
    assert host.explain("a").reason is Reason.KV_CONNECTOR
    connector.offers["a"] = (0, False)
    assert names(host.step().admitted) == ["a"]


def test_blocks_being_sent_are_held_until_the_send_is_done() -> None:
    host, connector = connected()
    connector.sends.add("a")
    host.add("a", 8, max_tokens=1)
    host.step()
    ((name, num_tokens, transfer_id),) = connector.ended
    assert (name, num_tokens) == ("a", 8)
    assert host.stats().num_free_blocks == 14
    host.transfer_done(transfer_id)
    assert host.stats().num_free_blocks == 16


def test_evicted_blocks_are_reported_with_their_keys() -> None:
    host, _ = connected()
    first = host.add("a", 28, max_tokens=1)
    host.run_to_end()
    host.add("b", 28, max_tokens=1)
    host.add("c", 28, max_tokens=1)
    saves = [save for output in host.run_to_end() for save in output.saves]
    keys = block_keys(first, 4)
    assert saves and {save.key for save in saves} <= set(keys)


def test_loads_of_a_failed_step_are_abandoned() -> None:
    host, connector = connected()
    connector.offers["a"] = (8, True)
    request = host.add("a", 12)
    output = host.schedule()
    host.fail(output)
    assert request.status is RequestStatus.WAITING
    assert host.stats().num_free_blocks == 14, "the device may have begun"
    host.transfer_done(output.loads[0].transfer_id, num_loaded_tokens=0)
    assert host.stats().num_free_blocks == 16


def test_connector_knobs_without_a_connector_are_refused() -> None:
    with pytest.raises(ConfigError, match="the scheduler has no connector"):
        Scheduler(small_config(kv_load_timeout=1.0))
    with pytest.raises(ConfigError, match="give a number of seconds above 0"):
        small_config(kv_load_timeout=0)
