"""Equal prefixes: all tokens from the first to the block's last must be equal, under the same root.

Prompts here are written in blocks of four tokens, `tokens_of_block(1) + tokens_of_block(2)` and so on, and one more
token, because at least one is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pointsman.core import Request
from pointsman.core.kv.prefix_tree import PrefixCache, Root
from tests.core.helpers import Host, blocks_of, cached_of


def tokens_of_block(number: int) -> list[int]:
    """The four tokens of block `number`; blocks with other numbers have none of these tokens."""
    return [4 * number, 4 * number + 1, 4 * number + 2, 4 * number + 3]


def tokens_of_blocks(*numbers: int) -> list[int]:
    """The tokens of the blocks with these numbers, one block after the other."""
    return [token for number in numbers for token in tokens_of_block(number)]


class Library:
    """A host on which prompts are computed one after the other, each ending with its first token."""

    def __init__(self, **config: int | bool) -> None:
        self.host = Host(**{"num_blocks": 64, "max_num_batched_tokens": 256, "max_model_len": 256, **config})
        self._count = 0

    def run(self, tokens: Sequence[int], **fields: str) -> int:
        """Compute a prompt; returns the number of its blocks that were found in the cache."""
        self._count += 1
        request_id = f"r{self._count}"
        self.host.add(request_id, [*tokens, 10_000 + self._count], max_tokens=1, **fields)
        cached = cached_of(self.host.run_to_end()[0])[request_id]
        assert cached % 4 == 0
        return cached // 4


def test_the_longest_common_prefix_in_full_blocks_is_found() -> None:
    library = Library()
    library.run(tokens_of_blocks(1, 2, 3))
    assert library.run(tokens_of_blocks(1, 2, 3, 4)) == 3
    assert library.run(tokens_of_blocks(1, 2, 9, 3)) == 2
    assert library.run(tokens_of_blocks(9, 2, 3)) == 0


def test_a_block_is_found_only_if_all_of_its_tokens_are_equal() -> None:
    library = Library()
    library.run(tokens_of_blocks(1, 2))
    assert library.run([*tokens_of_block(1), *tokens_of_block(2)[:3], 999]) == 1
    assert library.run([*tokens_of_block(1), 999, *tokens_of_block(2)[1:]]) == 1
    assert library.run([*tokens_of_block(1)[::-1], *tokens_of_block(2)]) == 0


@pytest.mark.parametrize("changed", [4 + 256, 4 + 65536, 4 + 2**24, 4 + 2**30])
def test_tokens_that_differ_only_in_a_high_byte_are_not_found(changed: int) -> None:
    library = Library()
    library.run([4, 5, 6, 7])
    assert library.run([changed, 5, 6, 7]) == 0
    assert library.run([4, 5, 6, 7]) == 1


def test_equal_tokens_after_different_prefixes_are_different_contents() -> None:
    library = Library()
    library.run(tokens_of_blocks(1, 7, 8))
    library.run(tokens_of_blocks(2, 7, 8))
    assert library.run(tokens_of_blocks(1, 7, 8)) == 3
    assert library.run(tokens_of_blocks(2, 7, 8)) == 3
    assert library.run(tokens_of_blocks(7, 8)) == 0, "nor at the start"
    assert library.run(tokens_of_blocks(3, 7, 8)) == 0


def test_a_block_may_follow_a_block_with_equal_tokens() -> None:
    library = Library()
    library.run(tokens_of_blocks(1, 1, 1))
    assert library.run(tokens_of_blocks(1, 1, 1, 1)) == 3
    assert library.run(tokens_of_blocks(1, 1, 2)) == 2


def test_a_prefix_branches_and_every_branch_is_found() -> None:
    library = Library()
    library.run(tokens_of_blocks(1, 2, 3, 4, 5))
    assert library.run(tokens_of_blocks(1, 2, 3, 6, 7)) == 3
    assert library.run(tokens_of_blocks(1, 2, 8)) == 2
    assert library.run(tokens_of_blocks(1, 9)) == 1
    assert library.run(tokens_of_blocks(1, 2, 3, 4, 5)) == 5
    assert library.run(tokens_of_blocks(1, 2, 3, 6, 7)) == 5
    assert library.run(tokens_of_blocks(1, 2, 8)) == 3
    assert library.run(tokens_of_blocks(1, 9)) == 2
    assert library.run(tokens_of_blocks(1, 2, 3, 6, 5)) == 4


def test_a_prefix_of_a_cached_prompt_is_found() -> None:
    library = Library()
    library.run(tokens_of_blocks(1, 2, 3, 4))
    assert library.run(tokens_of_blocks(1, 2)) == 2
    assert library.run(tokens_of_blocks(1, 2, 3, 4)) == 4


def test_a_prefix_published_by_several_requests_is_found_whole() -> None:
    library = Library()
    for length in range(1, 9):
        assert library.run(tokens_of_blocks(*range(length))) == length - 1
    assert library.run(tokens_of_blocks(*range(12))) == 8


def test_a_prompt_computed_in_many_chunks_is_found_whole() -> None:
    library = Library(max_num_batched_tokens=3, max_num_seqs=3)
    library.run(tokens_of_blocks(1, 2, 3, 4, 5))
    assert library.host.stats().num_steps > 4
    assert library.run(tokens_of_blocks(1, 2, 3, 4, 5)) == 5


def test_requests_with_different_salts_share_no_prefix() -> None:
    library = Library()
    library.run(tokens_of_blocks(1, 2), cache_salt="alice")
    assert library.run(tokens_of_blocks(1, 2), cache_salt="bob") == 0
    assert library.run(tokens_of_blocks(1, 2)) == 0
    assert library.run(tokens_of_blocks(1, 2), cache_salt="") == 0
    assert library.run(tokens_of_blocks(1, 2), cache_salt="alice") == 2
    assert library.run(tokens_of_blocks(1, 3), cache_salt="bob") == 1


def test_eviction_removes_the_end_of_the_least_recently_used_prefix() -> None:
    library = Library(num_blocks=7)
    library.run(tokens_of_blocks(1, 2, 3))
    library.run(tokens_of_blocks(4, 5))
    library.run(tokens_of_blocks(6, 7, 8))  # two blank blocks are left; it takes two cached ones
    assert library.host.stats().num_evictions == 2
    assert library.run(tokens_of_blocks(4, 5)) == 2
    assert library.run(tokens_of_blocks(1, 2, 3)) == 1


def test_evicting_a_branch_keeps_the_common_prefix_and_the_other_branch() -> None:
    library = Library(num_blocks=7)
    library.run(tokens_of_blocks(1, 2, 3))
    library.run(tokens_of_blocks(1, 2, 4))
    assert library.host.stats().num_cached_free_blocks == 4
    library.run(tokens_of_blocks(5, 6, 7))
    assert library.host.stats().num_evictions == 1
    assert library.run(tokens_of_blocks(1, 2, 4)) == 3
    assert library.run(tokens_of_blocks(1, 2, 3)) == 2


def test_evicted_content_can_be_computed_and_found_again() -> None:
    library = Library(num_blocks=4)
    for _ in range(3):
        assert library.run(tokens_of_blocks(1, 2, 3)) == 0
        assert library.run(tokens_of_blocks(4, 5, 6)) == 0
    assert library.run(tokens_of_blocks(4, 5, 6)) == 3


def test_a_referenced_prefix_is_not_evicted_but_its_suffix_is() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=64)
    host.add("done", [*tokens_of_blocks(1, 2, 3), 99], max_tokens=1)
    host.run_to_end()
    host.add("holder", [*tokens_of_blocks(1, 2), 98], max_tokens=20)
    host.step()
    host.add("filler", 19, max_tokens=1, use_prefix_cache=False)
    host.step()
    assert host.stats().num_evictions == 1, "the third block, which no request holds"
    host.add("again", [*tokens_of_blocks(1, 2, 3), 97], max_tokens=1)
    assert cached_of(host.step()) == {"again": 8}


def test_blocks_after_a_duplicate_block_are_found() -> None:
    host = Host(share_within_step=False, num_blocks=8, max_num_batched_tokens=64)
    host.add("a", [*tokens_of_blocks(1), 99], max_tokens=1)
    host.add("b", [*tokens_of_blocks(1, 2), 98], max_tokens=1)
    output = host.step()
    assert cached_of(output) == {"a": 0, "b": 0}
    assert blocks_of(output, "a")[0] != blocks_of(output, "b")[0]
    host.add("c", [*tokens_of_blocks(1, 2), 97], max_tokens=1)
    assert cached_of(host.step()) == {"c": 8}


def test_evicting_a_duplicate_keeps_blocks_after_the_other_duplicate() -> None:
    host = Host(share_within_step=False, num_blocks=8, max_num_batched_tokens=64)
    host.add("a", [*tokens_of_blocks(1), 99], max_tokens=1)
    host.add("b", [*tokens_of_blocks(1, 2), 98], max_tokens=20)
    host.step()
    host.add("filler", 17, max_tokens=1, use_prefix_cache=False)
    host.step()
    assert host.stats().num_evictions == 1, "a's copy of the first block"
    host.add("c", [*tokens_of_blocks(1, 2), 97], max_tokens=1)
    assert cached_of(host.step()) == {"c": 8}


def test_a_duplicate_stays_when_its_node_is_evicted_with_later_ones() -> None:
    """Without full attention, nodes at the end of a run are removed once they have no block in any group."""
    prefix = PrefixCache(8, 2, num_groups=1, anchor=None)
    request = Request("a", [1, 2, 3, 4, 5], arrival_time=0.0, max_tokens=1)
    tokens = np.array([1, 2, 3, 4], dtype=np.int32).tobytes()
    prefix.publish(Root(), tokens, 0, np.array([[5, 6]]), request)
    prefix.publish(Root(), tokens[:8], 0, np.array([[7]]), request)
    prefix.evict(np.array([6, 5]))
    assert prefix.is_cached(7)
    assert prefix.look_up(Root(), tokens, 2).blocks.tolist() == [[7]]
    prefix.evict(np.array([7]))
    assert prefix.blocks() == []
