"""KV events: content that enters and leaves the prefix cache, reported by chained hashes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from pointsman.core import EncoderInput
from pointsman.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from pointsman.core.kv.prefix_tree import Root
from pointsman.core.state.inputs import Adapter
from tests.core.helpers import Host


def host_with_kv_events(**config: Any) -> Host:
    return Host(enable_kv_cache_events=True, **config)


def documented_hashes(root: str, tokens: list[int]) -> list[bytes]:
    """The hashes as the documentation defines them, for blocks of 4 tokens."""
    name = hashlib.sha256(root.encode()).digest()
    names = []
    for start in range(0, len(tokens) - 3, 4):
        name = hashlib.sha256(name + np.array(tokens[start : start + 4], dtype="<i4").tobytes()).digest()
        names.append(name)
    return names


def test_kv_events_report_a_scheduled_prompt_with_chained_hashes() -> None:
    host = host_with_kv_events()
    prompt = host.prompt(9)
    host.add("a", prompt)
    host.schedule()
    names = documented_hashes("[null,null,null]", prompt)
    assert host.scheduler.take_kv_events() == [BlockStored(tuple(names), None, tuple(prompt[:8]), Root())]
    assert host.scheduler.take_kv_events() == []


def test_kv_events_name_the_parent_and_report_generated_blocks_last() -> None:
    host = host_with_kv_events(max_num_batched_tokens=4)
    prompt = host.prompt(6)
    request = host.add("a", prompt, max_tokens=4)
    host.run_to_end()
    first, second = host.scheduler.take_kv_events()
    names = documented_hashes("[null,null,null]", request.all_token_ids.tolist())
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == (tuple(names[:1]), None)
    assert (second.block_hashes, second.parent_block_hash) == (tuple(names[1:2]), names[0])
    assert second.token_ids == tuple(request.all_token_ids[4:8].tolist())


def test_kv_events_report_content_stored_once_and_removed_once() -> None:
    host = host_with_kv_events(share_within_step=False, num_blocks=8, max_model_len=32, max_num_batched_tokens=32)
    prompt = host.prompt(8)
    host.add("a", [*prompt, 1], max_tokens=2)
    host.add("b", [*prompt, 2], max_tokens=2)
    host.run_to_end()
    assert len(host.scheduler.take_kv_events()) == 1
    host.add("large", 30, max_tokens=1)
    host.step()
    removed = [event for event in host.scheduler.take_kv_events() if isinstance(event, BlockRemoved)]
    names = documented_hashes("[null,null,null]", prompt)
    assert [name for event in removed for name in event.block_hashes] == names[::-1], "the last block is removed first"


def test_kv_event_hashes_depend_on_cache_salt_and_adapter() -> None:
    host = host_with_kv_events(max_loras=2)
    prompt = host.prompt(5)
    host.add("plain", prompt)
    host.add("salted", prompt, cache_salt="s")
    host.add("adapted", prompt, adapter=Adapter("x", 3))
    host.step()
    stored = [event for event in host.scheduler.take_kv_events() if isinstance(event, BlockStored)]
    roots = ["[null,null,null]", '["s",null,null]', '[null,"x",3]']
    assert [list(event.block_hashes) for event in stored] == [documented_hashes(root, prompt) for root in roots]
    assert stored[2].root.adapter == Adapter("x", 3)


def test_kv_events_and_their_hashes_include_encoder_inputs() -> None:
    host = host_with_kv_events(encoder_budget=8, encoder_cache_size=16, max_num_batched_tokens=32)
    prompt = host.prompt(12)
    for name in ("cat", "dog"):
        host.add(name, prompt, encoder_inputs=[EncoderInput(name, 3, 3)], max_tokens=1)
    host.run_to_end()
    cat, dog = [event for event in host.scheduler.take_kv_events() if isinstance(event, BlockStored)]
    assert cat.token_ids == dog.token_ids == tuple(prompt), "tokens as the host gave them"
    assert not set(cat.block_hashes) & set(dog.block_hashes)
    assert [[(item.key, item.offset) for item in of_block] for of_block in cat.inputs] == [
        [("cat", 3)],
        [("cat", -1)],
        [],
    ]
    assert cat.extra_keys() == [(("cat", 3),), (("cat", -1),), None]


def test_kv_events_report_blocks_of_a_failed_step_as_removed() -> None:
    host = host_with_kv_events()
    host.add("a", 9)
    host.fail(host.schedule())
    stored, *removed = host.scheduler.take_kv_events()
    assert isinstance(stored, BlockStored)
    gone = [name for event in removed if isinstance(event, BlockRemoved) for name in event.block_hashes]
    assert tuple(gone) == stored.block_hashes[::-1]


def test_a_prefix_cache_reset_reports_all_blocks_as_cleared() -> None:
    host = host_with_kv_events()
    host.add("a", 9)
    host.step()
    host.reset_prefix_cache()
    assert isinstance(host.scheduler.take_kv_events()[-1], AllBlocksCleared)


def test_kv_events_are_off_by_default() -> None:
    host = Host()
    host.add("a", 9)
    host.step()
    assert host.scheduler.take_kv_events() == []
