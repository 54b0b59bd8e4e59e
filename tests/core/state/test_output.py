"""The fields of an output, and that a later step does not change them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.helpers import Host, blocks_of, cached_of, names, tokens_of


def host_with_all_kinds_of_rows() -> Host:
    """ "old" decodes, "long" is in the middle of its prompt, "back" ran before and waits, "new" waits."""
    host = Host(max_num_batched_tokens=12, max_num_seqs=4, long_prefill_token_threshold=4)
    host.add("old", 4)
    host.add("back", 4, use_prefix_cache=False)
    host.step()
    host.park("back")
    host.add("long", 12)
    host.step()
    host.ready("back")
    host.add("new", 3)
    return host


def test_rows_list_continued_requests_then_admitted_requests_in_order() -> None:
    output = host_with_all_kinds_of_rows().schedule()
    assert tokens_of(output) == {"old": 1, "long": 4, "back": 4, "new": 3}
    assert output.num_rows == 4
    assert output.num_continued == 2
    assert names(output.continued) == ["old", "long"]
    assert names(output.admitted) == ["back", "new"]
    assert names(output.resumed) == ["back"]
    assert names(output.new) == ["new"]
    assert output.is_resumed.tolist() == [True, False]
    assert output.total_num_scheduled_tokens == 12


def test_decode_rows_compute_only_the_newest_sampled_token() -> None:
    output = host_with_all_kinds_of_rows().schedule()
    assert names(output.decode) == ["old"]
    assert names(output.prefill) == ["long", "back", "new"]


def test_a_resumed_request_with_all_but_its_newest_token_cached_decodes() -> None:
    host = Host()
    host.add("a", 4)
    host.step()
    host.park("a")
    host.ready("a")
    output = host.step()
    assert (cached_of(output), tokens_of(output), names(output.decode)) == ({"a": 4}, {"a": 1}, ["a"])


def test_a_chunk_with_only_the_last_prompt_token_is_prefill() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 9, max_tokens=3)
    host.step()
    output = host.step()
    assert (tokens_of(output), names(output.prefill)) == ({"a": 1}, ["a"])
    assert names(host.step().decode) == ["a"]


def test_recomputing_a_generated_token_is_prefill() -> None:
    host = Host(enable_prefix_caching=False, long_prefill_token_threshold=1, max_num_seqs=1)
    host.add("a", 1)
    for _ in range(3):
        host.step()
    host.park("a")
    host.ready("a")
    host.add("waiting")
    outputs = [host.step() for _ in range(5)]
    assert [(names(output.prefill), names(output.decode)) for output in outputs[:3]] == [(["a"], [])] * 3
    assert names(outputs[3].decode) == names(outputs[4].decode) == ["a"], "its newest token, and the next"


def test_output_arrays_have_the_documented_types_and_shapes() -> None:
    output = host_with_all_kinds_of_rows().schedule()
    for name in ("rows", "serials", "num_computed_tokens", "num_scheduled_tokens"):
        array = getattr(output, name)
        assert (array.dtype, array.shape) == (np.int64, (4,)), name
    assert (output.samples.dtype, output.samples.shape) == (np.bool_, (4,))
    assert (output.num_cached_tokens.dtype, output.num_cached_tokens.shape) == (np.int64, (2,))
    assert (output.is_resumed.dtype, output.is_resumed.shape) == (np.bool_, (2,))
    assert output.block_ids.dtype == np.int32
    assert (output.block_offsets.dtype, output.block_offsets.shape) == (np.int64, (5,))
    assert output.block_offsets[0] == 0
    assert output.block_offsets[-1] == len(output.block_ids)
    assert (output.block_rows.dtype, output.block_rows.shape) == (np.int64, output.block_ids.shape)
    for index in range(4):
        assert np.array_equal(output.blocks(index), output.block_ids[output.block_rows == index])


def test_a_resumed_request_gets_its_whole_table_with_cached_blocks() -> None:
    host = Host()
    host.add("a", 9)
    host.step()
    host.park("a")
    host.ready("a")
    output = host.step()
    assert cached_of(output) == {"a": 8}
    assert len(blocks_of(output, "a")) == 3
    assert output.num_computed_tokens.tolist() == [8]


def test_a_resumed_request_has_a_new_serial() -> None:
    host = Host()
    host.add("a", 4)
    first = host.step().serials.tolist()
    assert host.step().serials.tolist() == first
    host.park("a")
    host.ready("a")
    assert host.step().serials.tolist() > first


def test_a_row_keeps_its_number_while_it_runs() -> None:
    host = Host()
    for request_id in "abc":
        host.add(request_id, 2)
    rows = dict(zip("abc", host.step().rows.tolist(), strict=True))
    host.abort("a")
    host.add("d", 2)
    output = host.step()
    now = dict(zip(names(output.requests), output.rows.tolist(), strict=True))
    assert (now["b"], now["c"]) == (rows["b"], rows["c"])


def test_an_output_does_not_change_in_later_steps() -> None:
    host = Host(num_blocks=8, max_model_len=32)
    for index in range(6):
        host.add(f"r{index}", 5, max_tokens=12)
    kept = []
    while host.scheduler.has_unfinished_requests():
        output = host.schedule()
        kept.append((output, copy_fields(output)))
        host.update(output)
        host.abort("r4")
    for output, before in kept:
        assert copy_fields(output) == before


def copy_fields(output: object) -> dict[str, object]:
    """Every field of an output, as plain values."""
    fields = {name: getattr(output, name) for name in output.__slots__}  # type: ignore[attr-defined]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else (list(value) if hasattr(value, "__len__") else value)
        for name, value in fields.items()
    }


def test_requests_finished_later_do_not_appear_in_an_earlier_output() -> None:
    host = Host()
    host.add("a", 4)
    output = host.schedule()
    host.abort("a")
    assert (names(output.finished), names(output.preempted)) == ([], [])


def test_a_step_without_rows_is_valid_and_updated_like_any_other() -> None:
    host = Host()
    output = host.schedule()
    assert (output.num_rows, output.total_num_scheduled_tokens, output.num_continued) == (0, 0, 0)
    assert (output.prefill, output.decode, list(output.requests)) == ([], [], [])
    assert output.block_offsets.tolist() == [0]
    update = host.update(output)
    assert (len(update.token_ids), len(update.counts), list(update.finished)) == (0, 0, [])
    assert host.schedule().step_id == output.step_id + 1


def test_the_host_cannot_write_into_arrays_of_an_output() -> None:
    host = Host()
    host.add("a", 4)
    host.step()
    output = host.schedule()
    for array in (output.rows, output.serials, output.num_scheduled_tokens, output.samples):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
