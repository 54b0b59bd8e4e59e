"""Encoder inputs: computed within a budget when their tokens are reached, cached, and part of the prefix key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    ConfigError,
    EncoderEntry,
    EncoderInput,
    ParkReason,
    Reason,
    Request,
    RequestRefused,
    SchedulerOutput,
    StepResult,
)
from pointsman.core.kv.content_marks import ContentMarks
from pointsman.core.policy.gate import Limit
from pointsman.core.state.reason import Holder
from tests.core.helpers import Host, blocks_of, cached_of, names, tokens_of
from tests.property.embeddings import ShadowEncoder


class ImageHost(Host):
    """A host whose encoder rejects steps that need missing embeddings."""

    def __init__(self, **overrides: Any) -> None:
        values = {"num_blocks": 64, "max_num_batched_tokens": 64, "encoder_budget": 8, "encoder_cache_size": 16}
        super().__init__(**{**values, **overrides})
        self.encoder = ShadowEncoder(self.config)

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        self.encoder.execute(output)
        return output

    def fail(self, output: SchedulerOutput) -> None:
        super().fail(output)
        self.encoder.void([output], None)


class EightTokens(Limit):
    name = "eight-tokens"

    def clip(self, batch: Any, rows: Any, want: Any) -> None:
        np.minimum(want, 8, out=want)

    def check(self, request: Request, start: int, want: int, view: Any) -> int:
        return min(want, 8)


def image(
    key: str, start: int, length: int, num_embeddings: int | None = None, mask: str | None = None
) -> EncoderInput:
    return EncoderInput(key, start, length, num_embeddings, mask)


def computed(output: SchedulerOutput) -> list[str]:
    """The encoder inputs that the step computes, as request:key."""
    return [f"{request.request_id}:{request.encoder_inputs[index].key}" for request, index in output.encoder_inputs]


def freed(output: SchedulerOutput) -> list[str]:
    return [entry.key for entry in output.freed_encoder_entries]


# ------------------------------------------------------------------ when inputs are computed


def test_an_encoder_input_is_computed_in_the_step_of_its_placeholders() -> None:
    host = ImageHost(max_num_batched_tokens=8)
    host.add("a", 24, encoder_inputs=[image("cat", 10, 4), image("dog", 18, 4)])
    told = [(tokens_of(output)["a"], computed(output)) for output in (host.step(), host.step(), host.step())]
    assert told == [(8, []), (8, ["a:cat"]), (8, ["a:dog"])]


def test_a_chunk_is_cut_before_an_input_over_the_encoder_budget() -> None:
    host = ImageHost(encoder_budget=5)
    host.add("a", 20, encoder_inputs=[image("cat", 2, 4), image("dog", 10, 4)])
    first, second = host.step(), host.step()
    assert (tokens_of(first), computed(first)) == ({"a": 10}, ["a:cat"])
    assert (tokens_of(second), computed(second)) == ({"a": 10}, ["a:dog"])


def test_encoder_budget_and_cache_count_embeddings_not_placeholders() -> None:
    host = ImageHost(encoder_budget=5)
    host.add("a", 20, encoder_inputs=[image("cat", 2, 9, 2), image("dog", 12, 1, 4)])
    assert tokens_of(host.step()) == {"a": 12}


def test_requests_of_a_step_share_the_encoder_budget() -> None:
    host = ImageHost(encoder_budget=5)
    host.add("a", 8, encoder_inputs=[image("cat", 0, 4)])
    host.add("b", 8, encoder_inputs=[image("dog", 3, 4)])
    host.add("c", 8, encoder_inputs=[image("cat", 1, 4)])
    output = host.step()
    assert tokens_of(output) == {"a": 8, "b": 3, "c": 8}, "b gets the text before its image; c shares that of a"
    assert computed(output) == ["a:cat"]


def test_placeholders_beyond_the_token_budget_compute_no_embeddings() -> None:
    host = ImageHost(max_num_batched_tokens=8, encoder_budget=4)
    host.add("a", 20, encoder_inputs=[image("cat", 10, 4)])
    host.add("b", 8, encoder_inputs=[image("dog", 0, 4)])
    host.step()
    host.add("c", 8, encoder_inputs=[image("cow", 3, 4)])
    told = [(tokens_of(output), computed(output)) for output in (host.step() for _ in range(3))]
    assert told == [({"a": 8}, ["a:cat"]), ({"a": 4, "b": 4}, ["b:dog"]), ({"a": 1, "b": 4, "c": 3}, [])]


def test_embeddings_stay_cached_when_a_chunk_ends_within_the_input() -> None:
    host = ImageHost(max_num_batched_tokens=4, encoder_cache_size=8)
    host.add("a", 12, encoder_inputs=[image("cat", 2, 8)])
    assert [computed(host.step()) for _ in range(3)] == [["a:cat"], [], []]


def test_without_chunked_prefill_a_request_needs_all_its_embeddings() -> None:
    host = ImageHost(enable_chunked_prefill=False)
    host.add("a", 8, encoder_inputs=[image("cat", 4, 4)])
    host.add("b", 12, encoder_inputs=[image("dog", 0, 4), image("cow", 8, 4)])
    host.add("c", 8)
    assert tokens_of(host.step()) == {"a": 8, "c": 8}
    told = host.explain("b")
    assert (told.reason, told.missing) == (Reason.ENCODER_BUDGET, 4)
    assert computed(host.step()) == ["b:dog", "b:cow"]


def test_an_encoder_input_is_computed_at_its_first_needed_embedding() -> None:
    host = ImageHost(max_num_batched_tokens=8)
    host.add("a", 24, encoder_inputs=[image("cat", 6, 6, None, "001011"), image("dog", 14, 4, None, "0000")])
    told = [(tokens_of(output)["a"], computed(output)) for output in (host.step(), host.step(), host.step())]
    assert told == [(8, []), (8, ["a:cat"]), (8, [])], "step 1 ends before its first embedding; dog has none"


def test_placeholders_behind_the_last_embedding_need_no_embedding() -> None:
    host = ImageHost(max_num_batched_tokens=8, encoder_cache_size=8)
    cat, prompt = image("cat", 2, 6, None, "110000"), [*range(9)]
    host.add("a", prompt[:8], encoder_inputs=[cat], max_tokens=1)
    assert computed(host.step()) == ["a:cat"]
    host.scheduler.reset_encoder_cache(0.0)
    host.add("b", prompt[:8], encoder_inputs=[cat], max_tokens=1)
    output = host.step()
    assert (cached_of(output), computed(output)) == ({"b": 4}, []), "the embeddings are found, and the text behind them"


def test_encoder_inputs_without_embeddings_need_no_encoder_budget() -> None:
    host = ImageHost(encoder_budget=0, encoder_cache_size=0)
    for name, key, hit in (("a", "x", 0), ("b", "y", 0), ("c", "x", 8), ("d", "z", 0)):
        host.add(name, [5] * 12, encoder_inputs=[image(key, 0, 4, 0)], max_tokens=1)
        output = host.step()
        assert (cached_of(output), computed(output)) == ({name: hit}, []), "the key is part of the prefix key"


def test_a_chunk_ends_before_an_encoder_input_that_it_would_split() -> None:
    host = ImageHost(max_num_batched_tokens=8, split_encoder_inputs="begun")
    host.add("a", 30, encoder_inputs=[image("cat", 6, 4), image("long", 12, 8, 8), image("dog", 21, 9, 4)])
    told = [(tokens_of(output)["a"], computed(output)) for output in (host.step() for _ in range(5))]
    assert told == [(6, []), (6, ["a:cat"]), (8, ["a:long"]), (1, []), (8, ["a:dog"])], (
        "the next chunk begins with the input; an input larger than any chunk is split"
    )


def test_a_request_waits_for_a_step_that_fits_its_encoder_input() -> None:
    host = ImageHost(max_num_batched_tokens=8, split_encoder_inputs=False)
    host.add("a", 5, max_tokens=4)
    host.add("b", 12, encoder_inputs=[image("cat", 0, 4), image("dog", 4, 8)])
    host.add("plain", 2, max_tokens=1)
    assert tokens_of(host.step()) == {"a": 5, "plain": 2}
    told = [tokens_of(host.step()), tokens_of(host.step())]
    assert told == [{"a": 1, "b": 4}, {"a": 1}], "beside a's token, no step fits eight"
    waits = host.explain("b")
    assert (waits.reason, waits.missing) == (Reason.BUDGET, 1)
    assert [tokens_of(host.step()) for _ in range(2)] == [{"a": 1}, {"b": 8}]


@pytest.mark.parametrize(
    "knobs",
    [{"max_num_batched_tokens": 8}, {"long_prefill_token_threshold": 8}, {"token_limits": (EightTokens(),)}],
    ids=["budget", "threshold", "limits"],
)
def test_an_encoder_input_longer_than_every_chunk_is_split(knobs: dict[str, Any]) -> None:
    host = ImageHost(split_encoder_inputs=False, **knobs)
    host.add("a", 14, encoder_inputs=[image("long", 2, 12, 4)], max_tokens=1)
    host.add("b", 1, max_tokens=9)
    told = [tokens_of(host.step()).get("a") for _ in range(3)]
    assert told == [2, 8, 4]


def test_used_embeddings_are_freed_and_recomputed_if_not_kept() -> None:
    host = ImageHost(keep_embeddings=False, num_blocks=8, max_num_batched_tokens=12, encoder_cache_size=8)
    host.add("a", 6, encoder_inputs=[image("cat", 0, 1, 8)], max_tokens=30)
    host.add("b", 6, encoder_inputs=[image("dog", 0, 1, 8)], max_tokens=30)
    told = [(computed(output), freed(output)) for output in (host.step() for _ in range(4))]
    assert told == [(["a:cat"], []), (["b:dog"], ["cat"]), ([], ["dog"]), ([], [])]
    outputs = host.run_to_end()
    assert any(output.preempted for output in outputs)
    assert [computed(output) for output in outputs if output.encoder_inputs] == [["b:dog"]], "when it starts again"


# ------------------------------------------------------------------ waiting


def test_a_request_whose_first_token_lacks_embeddings_is_skipped() -> None:
    host = ImageHost(encoder_budget=4)
    host.add("a", 8, encoder_inputs=[image("cat", 0, 4)])
    host.add("b", 8, encoder_inputs=[image("dog", 0, 4)])
    host.add("plain", 8)
    assert names(host.step().requests) == ["a", "plain"]
    told = host.explain("b")
    assert (told.reason, told.missing, told.position) == (Reason.ENCODER_BUDGET, 4, 0)
    assert names(host.step().admitted) == ["b"]


def test_the_knob_encoder_blocks_queue_prevents_bypasses() -> None:
    host = ImageHost(encoder_budget=4, encoder_blocks_queue=True)
    host.add("a", 8, encoder_inputs=[image("cat", 0, 4)])
    host.add("b", 8, encoder_inputs=[image("dog", 0, 4)])
    host.add("plain", 8)
    assert [names(host.step().admitted) for _ in range(2)] == [["a"], ["b", "plain"]]


def test_a_request_bypassed_too_often_for_embeddings_blocks_the_queue() -> None:
    host = ImageHost(encoder_budget=4, max_overtakes=1)
    host.add("a", 20, encoder_inputs=[image("cat", 0, 4), image("cow", 10, 4)])
    host.add("b", 8, encoder_inputs=[image("dog", 0, 4)])
    host.add("c", 1)
    assert names(host.step().requests) == ["a", "c"]
    host.add("d", 1)
    assert names(host.step().admitted) == [], "a computes its second image, and b was bypassed once already"
    assert (host.explain("b").reason, host.explain("d").reason) == (Reason.ENCODER_BUDGET, Reason.BEHIND)
    assert names(host.step().admitted) == ["b", "d"]


def test_held_embeddings_use_up_the_encoder_cache() -> None:
    host = ImageHost(max_num_batched_tokens=8, long_prefill_token_threshold=4, encoder_cache_size=8)
    host.add("a", 16, encoder_inputs=[image("cat", 0, 8)])
    host.add("b", 8, encoder_inputs=[image("dog", 0, 4)])
    assert tokens_of(host.step()) == {"a": 4}
    assert tokens_of(host.step()) == {"a": 4}
    told = host.explain("b")
    assert (told.reason, told.missing, told.blocker) == (Reason.ENCODER_CACHE, 4, "a")
    output = host.step()
    assert (tokens_of(output), freed(output)) == ({"a": 4, "b": 4}, ["cat"]), "a has passed its image"


def test_explain_says_which_input_a_running_row_waits_for() -> None:
    host = ImageHost(max_num_batched_tokens=8, long_prefill_token_threshold=2, encoder_cache_size=8)
    host.add("a", 12, encoder_inputs=[image("cat", 0, 8)])
    host.add("b", 8, encoder_inputs=[image("dog", 2, 4)])
    assert tokens_of(host.step()) == {"a": 2, "b": 2} and host.explain("b").reason is None
    began = host.now + 1
    for _ in range(3):
        assert tokens_of(host.step()) == {"a": 2}
        told = host.explain("b")
        assert (told.phase, told.reason, told.missing, told.since) == ("prefill", Reason.ENCODER_CACHE, 4, began)
        assert told.sentence == "b waits for 4 more embeddings: other requests hold the encoder cache. Held by a (8)."
    host.pause()
    host.step()
    assert host.explain("b").reason is Reason.PAUSED
    host.resume()
    assert tokens_of(host.step()) == {"a": 2, "b": 2} and host.explain("b").reason is None


def test_a_parked_row_no_longer_waits_for_embeddings() -> None:
    host = ImageHost(encoder_budget=4)
    host.add("a", 12, encoder_inputs=[image("cat", 4, 4), image("emu", 8, 4)])
    host.add("b", 12, encoder_inputs=[image("dog", 4, 4)])
    assert tokens_of(host.step()) == {"a": 8, "b": 4}
    assert tokens_of(host.step()) == {"a": 4}
    told = host.explain("b")
    assert (told.reason, told.missing, told.holders) == (Reason.ENCODER_BUDGET, 4, (Holder("a", 4),))
    assert told.since == host.now - 1
    host.park("b", ParkReason.GRAMMAR)
    assert host.explain("b").reason is Reason.PARKED
    host.ready("b")
    assert host.explain("b").reason is None, "no step has checked it"
    host.run_to_end()


def test_rows_within_encoder_inputs_do_not_wait_for_each_other() -> None:
    host = ImageHost(max_num_batched_tokens=8, long_prefill_token_threshold=3, encoder_cache_size=8, encoder_budget=8)
    host.add("a", 16, encoder_inputs=[image("cat", 0, 4), image("emu", 4, 8)], max_tokens=1)
    host.add("b", 16, encoder_inputs=[image("dog", 0, 4), image("yak", 4, 8)], max_tokens=1)
    assert len(host.run_to_end()) < 20


# ------------------------------------------------------------------ sharing and eviction


def test_encoder_inputs_with_an_equal_key_share_a_cache_entry() -> None:
    host = ImageHost()
    host.add("a", 6, encoder_inputs=[image("cat", 1, 4)])
    host.add("b", 9, encoder_inputs=[image("cat", 3, 4)])
    assert computed(host.step()) == ["a:cat"]
    host.add("c", 7, encoder_inputs=[image("cat", 2, 4)])
    output = host.step()
    assert ("c" in tokens_of(output), computed(output)) == (True, [])
    stats = host.stats()
    assert (stats.num_encoder_computed, stats.num_encoder_reused) == (4, 8)


def test_an_equal_key_with_other_embedding_count_is_another_cache_entry() -> None:
    host = ImageHost()
    host.add("a", 6, encoder_inputs=[image("cat", 1, 4)])
    host.add("b", 9, encoder_inputs=[image("cat", 3, 4, 2)])
    assert computed(host.step()) == ["a:cat", "b:cat"]


def test_the_least_recently_held_encoder_cache_entry_is_evicted() -> None:
    host = ImageHost(encoder_cache_size=8, max_num_seqs=1)
    for number, key in enumerate(("cat", "dog", "cat", "cow")):
        host.add(f"r{number}", 5, encoder_inputs=[image(key, 0, 4)], max_tokens=1)
    outputs = [output for output in host.run_to_end() if output.num_rows]
    assert [computed(output) for output in outputs] == [["r0:cat"], ["r1:dog"], [], ["r3:cow"]]
    assert [freed(output) for output in outputs] == [[], [], [], ["dog"]]


def test_a_step_never_evicts_an_encoder_cache_entry_that_it_uses() -> None:
    host = ImageHost(encoder_cache_size=8, encoder_budget=8, max_num_seqs=2)
    host.add("old", 5, encoder_inputs=[image("cat", 0, 4)], max_tokens=1)
    host.step()
    host.add("a", 5, encoder_inputs=[image("dog", 0, 4)])
    host.add("b", 5, encoder_inputs=[image("cat", 0, 4)])
    output = host.step()
    assert (computed(output), freed(output)) == (["a:dog"], [])


# ------------------------------------------------------------------ waiting requests hold no entries


@pytest.mark.parametrize("leave", ["park", "abort", "preempt"])
def test_only_running_requests_hold_embeddings(leave: str) -> None:
    """Seen in a released scheduler: a waiting request kept entries of the encoder cache that running ones needed."""
    overrides: dict[str, Any] = {"order": "priority"} if leave == "preempt" else {}
    host = ImageHost(max_num_batched_tokens=4, max_num_seqs=1, encoder_cache_size=8, **overrides)
    host.add("a", 12, encoder_inputs=[image("cat", 0, 8)], priority=5)
    host.step()
    assert host.stats().encoder_cache_usage == 1.0
    if leave == "park":
        host.park("a")
    elif leave == "abort":
        host.abort("a")
    else:
        host.add("urgent", 1, priority=0)
        host.step()
    assert host.stats().encoder_cache_usage == 0.0


def test_an_admission_that_fails_for_blocks_holds_no_embeddings() -> None:
    host = ImageHost(num_blocks=6, max_model_len=24)
    host.add("a", 16, max_tokens=8)
    host.step()
    host.add("b", 12, encoder_inputs=[image("cat", 0, 8)])
    output = host.step()
    assert host.explain("b").reason is Reason.BLOCKS
    assert (computed(output), host.stats().encoder_cache_usage) == ([], 0.0)


def test_a_failed_step_releases_and_recomputes_its_embeddings() -> None:
    host = ImageHost(max_num_batched_tokens=4)
    host.add("a", 12, encoder_inputs=[image("cat", 2, 8)])
    output = host.schedule()
    assert computed(output) == ["a:cat"]
    host.fail(output)
    assert host.stats().encoder_cache_usage == 0.0
    again = host.step()
    assert (computed(again), freed(again)) == (["a:cat"], ["cat"])


def test_embeddings_freed_in_a_void_output_are_reported_freed_again() -> None:
    host = ImageHost(encoder_cache_size=4, encoder_budget=4)
    host.add("a", 5, encoder_inputs=[image("cat", 0, 4)], max_tokens=1)
    host.step()
    host.add("b", 5, encoder_inputs=[image("dog", 0, 4)], max_tokens=1)
    output = host.schedule()
    assert freed(output) == ["cat"]
    host.fail(output)
    host.abort("b")
    assert freed(host.step()) == ["cat", "dog"]


def test_a_rewound_row_recomputes_embeddings_that_were_freed() -> None:
    host = ImageHost(max_num_batched_tokens=4, max_steps_in_flight=2)
    host.add("a", 16, encoder_inputs=[image("cat", 2, 8)])
    first, second = host.schedule(), host.schedule()
    assert (computed(first), computed(second)) == (["a:cat"], [])
    host.scheduler.fail(first, host.now)
    host.encoder.void([first, second], None)
    assert computed(host.step()) == ["a:cat"]


def test_embeddings_of_a_row_with_an_error_are_dropped() -> None:
    host = ImageHost()
    host.add("a", 5, encoder_inputs=[image("cat", 0, 4)])
    output = host.schedule()
    host.scheduler.update(output, StepResult([], errors={0: "broken image"}), host.now)
    host.add("b", 9, encoder_inputs=[image("cat", 0, 4)])
    output = host.step()
    assert (computed(output), freed(output)) == (["b:cat"], ["cat"])


def test_a_cache_reset_drops_embeddings_of_half_computed_inputs() -> None:
    host = ImageHost(max_num_batched_tokens=4)
    host.add("a", 12, encoder_inputs=[image("cat", 0, 8)])
    host.step()
    host.scheduler.reset_encoder_cache(host.now)
    host.encoder.distrust()
    output = host.step()
    assert (tokens_of(output), computed(output), freed(output)) == ({"a": 4}, ["a:cat"], ["cat"])


# ------------------------------------------------------------------ priority preemption


def test_no_preemption_for_a_request_that_would_lack_embeddings() -> None:
    host = ImageHost(order="priority", max_num_seqs=2, encoder_budget=4, long_prefill_token_threshold=8)
    host.add("a", 20, encoder_inputs=[image("cat", 10, 4)], priority=0)
    host.add("b", 4, priority=5)
    host.step()
    host.add("urgent", 6, encoder_inputs=[image("dog", 0, 4)], priority=1)
    output = host.step()
    assert (computed(output), names(output.preempted)) == (["a:cat"], [])
    output = host.step()
    assert (names(output.preempted), names(output.admitted)) == (["b"], ["urgent"])


# ------------------------------------------------------------------ the prefix cache


def found(*inputs: list[EncoderInput], length: int = 13, **overrides: Any) -> list[int]:
    """Cached tokens of requests with the same tokens and these encoder inputs, one after the other."""
    host = ImageHost(**overrides)
    prompt = host.prompt(length)
    cached = []
    for number, given in enumerate(inputs):
        host.add(f"r{number}", prompt, encoder_inputs=given, max_tokens=1)
        output = host.step()
        cached.append(cached_of(output)[f"r{number}"])
    return cached


def test_a_block_with_placeholders_hits_only_for_the_same_content() -> None:
    cat, dog = [image("cat", 5, 4)], [image("dog", 5, 4)]
    assert found(cat, cat, dog, [], dog) == [0, 12, 4, 4, 12]


def test_the_position_within_the_content_is_part_of_the_block_key() -> None:
    assert found([image("cat", 4, 8)], [image("cat", 4, 4), image("cat", 8, 4)], [image("cat", 3, 8)]) == [0, 4, 0]


def test_text_tokens_equal_to_placeholder_tokens_are_no_cache_hit() -> None:
    host = ImageHost()
    host.add("image", [7] * 9, encoder_inputs=[image("cat", 0, 8)], max_tokens=1)
    host.step()
    host.add("text", [7] * 9, max_tokens=1)
    assert cached_of(host.step()) == {"text": 0}


def test_placeholder_tokens_are_part_of_the_block_key() -> None:
    """A model may read some of them as tokens, such as the end of a line of an image."""
    host = ImageHost()
    prompt = np.array([7] * 9)
    for request_id, newline in (("a", 7), ("b", 8), ("c", 8), ("d", 7)):
        prompt[2] = newline
        host.add(request_id, prompt, encoder_inputs=[image("cat", 0, 8)], max_tokens=1)
        assert cached_of(host.step())[request_id] == (8 if request_id in "cd" else 0)


def test_a_prefix_cache_hit_over_placeholders_needs_no_encoder() -> None:
    host = ImageHost(encoder_cache_size=8)
    prompt = host.prompt(13)
    for request_id in ("a", "b"):
        host.add(request_id, prompt, encoder_inputs=[image("cat", 2, 8)], max_tokens=1)
        host.step()
        host.add(f"{request_id} evicts", 10, encoder_inputs=[image("dog", 0, 8)], max_tokens=1)
        host.step()
    assert host.stats().num_encoder_computed == 8 + 8, "cat once; b finds its KV, and dog is still there"


def test_a_prefix_cache_hit_within_an_input_needs_its_embeddings() -> None:
    host = ImageHost()
    prompt = host.prompt(13)
    host.add("a", prompt[:7], encoder_inputs=[image("cat", 3, 4)], max_tokens=1)
    host.step()
    host.add("b", prompt, encoder_inputs=[image("cat", 3, 4)], max_tokens=1)
    output = host.step()
    assert (cached_of(output), computed(output)) == ({"b": 4}, [])
    assert host.stats().num_encoder_reused == 4


def test_requests_of_one_step_share_the_blocks_of_an_image() -> None:
    host = ImageHost()
    prompt = host.prompt(13)
    for request_id, key in (("a", "cat"), ("b", "cat"), ("c", "dog")):
        host.add(request_id, prompt, encoder_inputs=[image(key, 5, 4)])
    output = host.step()
    assert cached_of(output) == {"a": 0, "b": 12, "c": 4}
    assert blocks_of(output, "a")[:3] == blocks_of(output, "b")[:3]


def test_generated_tokens_behind_an_image_are_cached() -> None:
    host = ImageHost()
    prompt = host.prompt(6)
    done = host.add("a", prompt, encoder_inputs=[image("cat", 1, 4)], max_tokens=6)
    host.run_to_end()
    host.add("next", done.all_token_ids, encoder_inputs=[image("cat", 1, 4)])
    host.add("other", done.all_token_ids, encoder_inputs=[image("dog", 1, 4)])
    assert cached_of(host.step()) == {"next": 8, "other": 0}


def test_reused_content_marks_of_inputs_give_no_wrong_cache_hits() -> None:
    host = ImageHost()
    host.scheduler._kv._marks = ContentMarks(num_marks=20)
    prompt = host.prompt(9)
    cached = []
    for number, key in enumerate(("cat", "dog", "cat", "cow", "emu", "cat", "cat", "dog")):
        host.add(f"r{number}", prompt, encoder_inputs=[image(key, 0, 8)], max_tokens=1)
        cached += cached_of(host.step()).values()
    assert cached == [0, 0, 8, 0, 0, 0, 8, 0]
    assert host.scheduler._kv._marks.generation >= 1


# ------------------------------------------------------------------ arguments


def test_a_request_keeps_its_encoder_inputs_and_prompt_tokens() -> None:
    request = Request("a", range(9), arrival_time=0.0, max_tokens=1, encoder_inputs=[("cat", 1, 3), ["dog", 4, 2, 7]])
    assert request.encoder_inputs == (EncoderInput("cat", 1, 3, 3), EncoderInput("dog", 4, 2, 7))
    assert [item.entry for item in request.encoder_inputs] == [EncoderEntry("cat", 3), EncoderEntry("dog", 7)]
    assert np.array_equal(request.prompt_token_ids, np.arange(9)), "the tokens are the caller's, whatever the key is"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([("cat", 1, 3), ("dog", 3, 2)], "'dog' starts at 3, but the input before it ends at 4"),
        ([("cat", 4, 2), ("dog", 1, 2)], "'dog' starts at 1, but the input before it ends at 6"),
        ([("cat", 6, 4)], "'cat' ends at 10, but the prompt has only 9 tokens"),
        ([("cat", -1, 4)], "start is -1; it must be between 0 and"),
        ([("cat", 1, 0)], "length is 0; it must be between 1 and"),
        ([("cat", 1, 1, -1)], "num_embeddings is -1; it must be between 0 and"),
        ([("", 1, 1)], r"an encoder input is .*give \(key, start, length, num_embeddings, mask\)"),
        ([("cat", 1, 3, 1, "011")], "'cat' has num_embeddings 1, but its mask has 2 ones"),
        ([("cat", 1, 3, None, "01")], "'cat' has the mask '01'; give 3 characters, each 0 or 1"),
        ([("cat", 1, 3, None, "012")], "give 3 characters, each 0 or 1"),
        ([(5, 1, 1)], "an encoder input is"),
        (["cat"], "an encoder input is 'cat'"),
    ],
)
def test_invalid_encoder_inputs_are_refused(inputs: list[Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        Request("a", range(9), arrival_time=0.0, max_tokens=1, encoder_inputs=inputs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"encoder_budget": 0, "encoder_cache_size": 0}, r"1 encoder input\(s\) and encoder_budget is 0"),
        ({"encoder_budget": 5}, "'cat' has 6 embeddings, more than encoder_budget 5; raise encoder_budget"),
        ({"encoder_cache_size": 5}, "'cat' has 6 embeddings, more than encoder_cache_size 5"),
    ],
)
def test_encoder_inputs_that_can_never_be_computed_are_refused(overrides: dict[str, int], message: str) -> None:
    host = ImageHost(**overrides)
    with pytest.raises(RequestRefused, match=message):
        host.add("a", 9, encoder_inputs=[image("cat", 0, 4, 6)])


def test_without_chunked_prefill_all_encoder_inputs_must_fit_together() -> None:
    host = ImageHost(enable_chunked_prefill=False)
    host.add("same", 12, encoder_inputs=[image("cat", 0, 6), image("cat", 6, 6)], max_tokens=1)
    with pytest.raises(RequestRefused, match="12 embeddings, more than encoder_budget 8, and chunked prefill is off"):
        host.add("a", 12, encoder_inputs=[image("cat", 0, 6), image("dog", 6, 6)])
    host.run_to_end()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"encoder_budget": 4}, "encoder_budget is 4 and encoder_cache_size is 0, so no encoder input is accepted"),
        ({"encoder_cache_size": 4}, "encoder_cache_size is 4 and encoder_budget is 0, so no encoder input is accepted"),
        ({"encoder_budget": -1}, "encoder_budget is -1; it must be between 0 and"),
        ({"split_encoder_inputs": False}, "split_encoder_inputs=False has no effect without encoder inputs"),
        ({"keep_embeddings": False}, "keep_embeddings=False has no effect without encoder inputs"),
    ],
)
def test_invalid_encoder_knobs_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(**values)
