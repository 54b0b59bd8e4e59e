"""`explain`: why a request does not advance, for which requests it waits, since when, and how much it lacks."""

from __future__ import annotations

import pytest

from pointsman.core import ParkReason, Reason, RequestStatus
from pointsman.core.observe.explain import CAUSES, PARKED_FOR
from pointsman.core.state.reason import Holder
from tests.core.helpers import Host, connected, names


def test_a_request_has_no_reason_to_wait_before_its_first_step() -> None:
    host = Host()
    host.add("a", 5)
    told = host.explain("a")
    assert (told.request_id, told.status, told.phase) == ("a", RequestStatus.WAITING, "waiting")
    assert (told.reason, told.blocker, told.missing, told.since, told.position) == (None, None, 0, None, 0)
    assert (told.num_tokens, told.num_computed_tokens, told.num_blocks) == (5, 0, 0)


def test_the_explanation_of_a_running_request_has_its_progress() -> None:
    host = Host(max_num_batched_tokens=8)
    prompt = host.prompt(9)
    host.add("z", prompt, max_tokens=1)
    host.run_to_end()
    host.add("a", [*prompt, *host.prompt(11)])
    host.step()
    told = host.explain("a")
    assert (told.status, told.phase, told.reason, told.position) == (RequestStatus.RUNNING, "prefill", None, None)
    assert (told.num_tokens, told.num_computed_tokens, told.num_cached_tokens, told.num_blocks) == (20, 16, 8, 4)
    host.step()
    assert host.explain("a").phase == "decoding"


def head_that_lacks_blocks() -> Host:
    """Two requests run, and a third one finds too few blocks."""
    host = Host(num_blocks=8, max_model_len=32)
    host.add("small", 4, max_tokens=20)
    host.add("large", 12, max_tokens=20)
    host.step()
    host.add("head", 17)
    host.step()
    return host


def test_the_largest_holder_of_blocks_is_named_first() -> None:
    host = head_that_lacks_blocks()
    told = host.explain("head")
    assert (told.reason, told.blocker) == (Reason.BLOCKS, "large")
    assert told.missing == 3, (
        "it needs 5 blocks, 4 of them for the first chunk; both running requests have taken another one"
    )


def test_an_explanation_has_the_start_of_the_reason_and_current_missing() -> None:
    host = Host(num_blocks=10, max_model_len=32)
    host.add("a", 12, max_tokens=20)
    host.step()
    host.add("b", 26)
    host.step()
    began = host.now - 1  # `schedule` is the call before the last
    first = host.explain("b")
    assert (first.reason, first.since, first.missing) == (Reason.FULL_SEQUENCE, began, 1)
    for _ in range(4):
        host.step()
    later = host.explain("b")
    assert (later.reason, later.since) == (Reason.FULL_SEQUENCE, began)
    assert later.missing == 2, "a has taken another block"


def test_since_of_an_explanation_restarts_when_the_reason_changes() -> None:
    host = Host(max_num_seqs=2, num_blocks=8, max_model_len=32)
    host.add("a", 4, max_tokens=4)
    host.add("b", 16, max_tokens=12)
    host.step()
    host.step()
    host.add("c", 16)
    host.step()
    assert host.explain("c").reason is Reason.SEQUENCE_LIMIT
    first = host.explain("c").since
    host.abort("a")
    host.step()
    told = host.explain("c")
    assert told.reason is Reason.BLOCKS
    assert first is not None and told.since is not None
    assert told.since > first


def test_explanations_behind_the_head_name_the_head_and_the_position() -> None:
    host = Host(max_num_seqs=1)
    for request_id in "abcd":
        host.add(request_id, 4)
    host.step()
    told = {request_id: host.explain(request_id) for request_id in "bcd"}
    assert [told[request_id].position for request_id in "bcd"] == [0, 1, 2]
    assert told["b"].reason is Reason.SEQUENCE_LIMIT
    assert [(told[request_id].reason, told[request_id].blocker) for request_id in "cd"] == [(Reason.BEHIND, "b")] * 2


def test_since_of_a_request_behind_others_is_the_time_it_was_queued() -> None:
    host = Host(max_num_seqs=1)
    host.add("a", 4)
    host.step()
    host.add("b", 4)
    began = host.now + 1
    host.add("c", 4)
    for _ in range(3):
        host.step()
        assert (host.explain("c").reason, host.explain("c").since) == (Reason.BEHIND, began)
    host.park("c")
    host.step()
    began = host.now + 1
    host.ready("c")
    host.step()
    assert (host.explain("c").reason, host.explain("c").since) == (Reason.BEHIND, began)
    host.park("a")
    host.ready("a")
    host.schedule()
    assert (host.explain("c").reason, host.explain("c").since) == (Reason.BEHIND, began), "it did not move"


def test_a_request_behind_a_new_head_does_not_keep_its_old_reason() -> None:
    host = Host(order="priority", max_num_seqs=1, displace=False)
    host.add("a", 4)
    host.step()
    host.add("b", 4, priority=5)
    host.step()
    assert host.explain("b").reason is Reason.SEQUENCE_LIMIT
    host.add("c", 4, priority=1)
    told = host.explain("b")
    assert (told.reason, told.blocker, told.missing, told.position) == (Reason.BEHIND, "c", 0, 1)


def test_a_parked_request_has_no_holders() -> None:
    host = Host()
    host.add("a", 4, park=ParkReason.GRAMMAR)
    told = host.explain("a")
    assert (told.status, told.reason, told.since) == (RequestStatus.WAITING_FOR_GRAMMAR, Reason.PARKED, host.now)
    assert (told.blocker, told.position) == (None, None)
    host.ready("a")
    assert host.explain("a").reason is None


def test_the_explanation_counts_preemptions() -> None:
    host = Host()
    host.add("a", 4)
    for _ in range(2):
        host.step()
        host.park("a")
        host.ready("a")
    told = host.explain("a")
    assert (told.status, told.num_preemptions, told.num_computed_tokens) == (RequestStatus.PREEMPTED, 2, 0)


def test_a_finished_request_is_explained_until_it_is_reported() -> None:
    host = Host()
    host.add("a", 4, max_tokens=1)
    host.step()
    told = host.explain("a")
    assert (told.status, told.phase, told.reason, told.num_blocks) == (
        RequestStatus.FINISHED_LENGTH,
        "finished",
        None,
        0,
    )


def test_in_static_batching_requests_wait_for_the_running_batch() -> None:
    host = Host(batching="static")
    host.add("a", 4)
    host.step()
    host.add("b", 4)
    host.step()
    told = host.explain("b")
    assert (told.reason, told.blocker) == (Reason.STATIC_BATCH, "a")


def test_explain_changes_no_decision() -> None:
    def decisions(ask: bool) -> list[tuple[list[str], list[int]]]:
        host = Host(num_blocks=8, max_model_len=32, order="priority")
        for index in range(6):
            host.add(f"r{index}", 5, max_tokens=9, priority=index % 2)
        made = []
        while host.scheduler.has_unfinished_requests():
            if ask:
                for index in range(6):
                    if host.scheduler.get_request(f"r{index}"):
                        host.explain(f"r{index}")
                host.stats()
            output = host.step()
            made.append(([r.request_id for r in output.requests], output.block_ids.tolist()))
        return made

    assert decisions(ask=True) == decisions(ask=False)


# ------------------------------------------------------------------------------------- holders


def test_every_reason_and_every_parked_status_has_a_text() -> None:
    assert set(CAUSES) == set(Reason)
    assert set(PARKED_FOR) == {reason.status for reason in ParkReason}
    assert all(cause.text for cause in CAUSES.values())


def test_holders_of_blocks_are_sorted_by_table_length() -> None:
    host = head_that_lacks_blocks()
    told = host.explain("head")
    assert (told.resource, told.holders, told.num_holders) == (
        "KV blocks",
        (Holder("large", 4), Holder("small", 2)),
        2,
    )
    assert told.sentence == "head waits for 3 more KV blocks: too few KV blocks are free. Held by large (4), small (2)."


def test_holders_of_sequence_slots_are_in_admission_order() -> None:
    host = Host(max_num_seqs=2)
    for request_id in "abc":
        host.add(request_id, 4)
    host.step()
    told = host.explain("c")
    assert (told.resource, told.missing, told.holders) == ("sequence slots", 1, (Holder("a", 1), Holder("b", 1)))
    assert told.sentence == "c waits for 1 more sequence slot: all sequence slots are taken. Held by a (1), b (1)."


def test_holders_of_the_token_budget_are_requests_of_the_last_step() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 3)
    host.add("b", 7)
    host.add("c", 4)
    host.step()
    told = host.explain("c")
    assert (told.reason, told.resource) == (Reason.BUDGET, "tokens of the step's budget")
    assert told.holders == (Holder("b", 5), Holder("a", 3))
    host.abort("b")
    assert host.explain("c").holders == (Holder("a", 3),), "a finished request holds nothing"


def test_an_explanation_names_a_token_limit_below_the_budget() -> None:
    host = Host(num_blocks=64, max_num_batched_tokens=256, token_limits=("prefill-gap:seconds=0.001,least=8",))
    host.add("a", 4, max_tokens=60)
    for _ in range(4):
        host.step()
    host.add("b", 40, max_tokens=8)
    host.add("c", 40, max_tokens=8)
    host.add("d", 40, max_tokens=8)
    computed = host.step().total_num_scheduled_tokens
    assert host.explain("c").reason is Reason.BUDGET
    cause = f"the step computes {computed} of 256 tokens, as prefill-gap limits it"
    assert (
        host.explain("c").sentence == f"c waits for 1 more token of the step's budget: {cause}. Held by b (8), a (1)."
    )
    assert host.explain("d").sentence == f"d waits behind c, which waits: {cause}."


def test_an_explanation_names_the_request_that_caused_a_preemption() -> None:
    host = Host(order="priority", max_num_seqs=1)
    host.add("low", 4, priority=5)
    host.step()
    host.add("urgent", 4, priority=0)
    host.step()
    told = host.explain("low")
    assert (told.reason, told.blocker) == (Reason.DISPLACEMENT, "urgent")
    assert told.sentence == (
        "low waits: requests were preempted for a more urgent one, which is admitted alone. Held by urgent."
    )


def test_sentences_of_requests_behind_the_head_have_its_reason() -> None:
    host = Host(max_num_seqs=1)
    for request_id in "abc":
        host.add(request_id, 4)
    host.step()
    assert host.explain("c").sentence == "c waits behind b, which waits: all sequence slots are taken."


def test_a_preempted_request_with_samples_in_flight_waits_for_them() -> None:
    host = Host(max_steps_in_flight=2)
    host.add("a", 4)
    output = host.schedule()
    host.park("a")
    host.ready("a")
    host.schedule()
    told = host.explain("a")
    assert (told.reason, told.resource, told.missing, told.holders) == (Reason.IN_FLIGHT, "samples", 1, ())
    host.update(output)


# ------------------------------------------------------------------------- running requests that were left out


def test_a_row_without_budget_waits_for_the_requests_that_used_it() -> None:
    host = Host(batching="prefill-first", shortage="in-order", max_num_batched_tokens=2)
    for name in "abc":
        host.add(name, 1)
    host.step()
    host.step()
    assert host.explain("a").sentence == "a waits: the step is for prompts, which come before decode. Held by c (1)."
    assert host.explain("c").since is None
    host.step()
    began = host.now - 1
    for _ in range(3):
        told = host.explain("c")
        assert (told.reason, told.missing, told.holders) == (Reason.BUDGET, 1, (Holder("a", 1), Holder("b", 1)))
        assert told.since == began
        host.step()
    assert host.explain("a").since is None
    told = host.explain("c")
    assert told.sentence == "c waits for 1 more token of the step's budget: the step is full. Held by a (1), b (1)."
    assert host.explain("a").sentence == "a runs."


def test_prefill_first_decoding_rows_wait_while_a_step_runs_prompts() -> None:
    host = Host(batching="prefill-first", shortage="in-order")
    host.add("decodes", 4)
    host.step()
    host.add("prompt", 4)
    host.step()
    told = host.explain("decodes")
    assert (told.reason, told.blocker, told.since) == (Reason.PREFILL_FIRST, "prompt", host.now - 1)
    host.step()
    assert (host.explain("decodes").reason, host.explain("decodes").since) == (None, None)
    host.add("another", 4)
    host.step()
    told = host.explain("decodes")
    assert (told.reason, told.since) == (Reason.PREFILL_FIRST, host.now - 1), "it ran in between"


def test_a_step_with_the_last_token_of_a_prompt_is_a_prefill_step() -> None:
    host = Host(batching="prefill-first", shortage="in-order", max_num_batched_tokens=5)
    host.add("decodes", 1)
    host.step()
    host.add("prompt", 6)
    host.step()
    output = host.step()
    assert (names(output.requests), output.total_num_scheduled_tokens) == (["prompt"], 1)
    assert host.explain("decodes").reason is Reason.PREFILL_FIRST


def test_rows_beyond_max_num_seqs_wait_for_a_sequence_slot() -> None:
    host = Host(batching="prefill-first", shortage="in-order", max_num_seqs=2, max_num_active_seqs=3)
    for name in "abc":
        host.add(name, 4)
    host.step()
    host.step()
    host.step()
    told = host.explain("c")
    assert (told.reason, told.missing) == (Reason.SEQUENCE_LIMIT, 1)
    assert told.holders == (Holder("a", 1), Holder("b", 1))


def test_a_row_that_does_not_run_ahead_waits_for_its_own_sample() -> None:
    host = Host(max_steps_in_flight=2)
    host.add("a", 4, runs_ahead=False)
    output = host.schedule()
    empty = host.schedule()
    told = host.explain("a")
    assert (told.reason, told.missing, told.holders) == (Reason.IN_FLIGHT, 1, ())
    host.update(output)
    host.update(empty)
    assert host.explain("a").reason is None


def test_with_shortage_in_order_rows_behind_a_victim_wait_for_blocks() -> None:
    host = Host(shortage="in-order", order="priority", num_blocks=3, max_model_len=12)
    host.add("a", 1)
    host.add("yields", 3, priority=5)
    host.step()
    host.add("c", 1)
    host.step()
    output = host.step()
    assert names(output.preempted) == ["yields"] and names(output.requests) == ["a"]
    told = host.explain("c")
    assert (told.reason, told.blocker, told.resource) == (Reason.BLOCKS, "a", "KV blocks")
    assert told.since == host.now - 1
    assert told.holders == (Holder("a", 1),), "others: it also holds one"


def test_since_of_an_unscheduled_row_is_kept_when_the_batch_grows() -> None:
    host = Host(
        batching="prefill-first",
        shortage="in-order",
        num_blocks=400,
        max_num_batched_tokens=8,
        max_num_seqs=100,
    )
    host.add("first", 4)
    host.step()
    for index in range(150):
        host.add(f"r{index}", 4, max_tokens=3)
    host.step()
    began = host.now - 1
    for _ in range(40):
        host.step()
        told = host.explain("first")
        assert (told.reason, told.since) == (Reason.PREFILL_FIRST, began)
    assert host.scheduler.num_running > 70


def test_rows_that_a_pause_stopped_have_no_reason_after_the_pause() -> None:
    host = Host()
    host.add("a", 4)
    host.step()
    host.pause()
    host.step()
    assert host.explain("a").reason is Reason.PAUSED
    host.resume()
    assert host.explain("a").sentence == "a runs."


@pytest.mark.parametrize("reason", ParkReason)
def test_the_explanation_of_a_parked_request_has_its_cause(reason: ParkReason) -> None:
    host = Host()
    host.add("a", 4, park=reason)
    assert host.explain("a").sentence == f"a waits: {PARKED_FOR[reason.status]}."


def test_explanations_of_requests_that_do_not_wait_have_a_sentence() -> None:
    host = Host()
    host.add("a", 4, max_tokens=1)
    assert host.explain("a").sentence == "a has not been tried in a step yet."
    output = host.schedule()
    assert host.explain("a").sentence == "a runs."
    host.update(output)
    assert host.explain("a").sentence == "a has finished."


def test_an_explanation_names_the_largest_holders_and_counts_all() -> None:
    host = Host(max_num_seqs=12, max_num_batched_tokens=16)
    for index in range(13):
        host.add(f"r{index}", 1)
    host.step()
    told = host.explain("r12")
    assert (len(told.holders), told.num_holders) == (8, 12)
    assert told.sentence.endswith("Held by r0 (1), r1 (1), r2 (1) and 9 more.")


def test_a_request_whose_kv_is_loading_names_the_transfer() -> None:
    host, connector = connected()
    connector.offers["a"] = (8, True)
    host.add("a", 12)
    (load,) = host.step().loads
    began = host.now - 1
    told = host.explain("a")
    assert (told.reason, told.transfer, told.since, told.num_blocks) == (Reason.KV_LOAD, load.transfer_id, began, 2)
    assert told.sentence == f"a waits: its KV is being loaded (transfer {load.transfer_id})."


def test_transfers_of_finished_requests_are_holders_of_blocks() -> None:
    host, connector = connected()
    connector.offers |= {"gone": (12, True), "loads": (16, True), "waits": (16, True)}
    for name, length in (("gone", 16), ("loads", 20), ("waits", 20)):
        host.add(name, length)
    gone, loads = host.step().loads
    host.abort("gone")
    told = host.explain("waits")
    assert (told.reason, told.missing, told.resource) == (Reason.KV_ROOM, 3, "KV blocks")
    assert told.holders == (Holder("loads", 4, "", loads.transfer_id), Holder("gone", 3, "", gone.transfer_id))
    assert told.sentence.endswith(
        f"Held by transfer {loads.transfer_id} of loads (4), transfer {gone.transfer_id} of gone (3)."
    )
