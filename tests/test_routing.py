"""Routing: the bound holds for every sequence of requests, prefixes are exact, and equal prefixes stay together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing import MAX_LEAD, Router, SentBlocks, full_blocks

BLOCK = 16
"""Bytes of a block of two tokens."""

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("send"), prompts, st.sampled_from(["", "salt"])),
        st.tuples(st.just("finish"), st.integers(0, 3), st.just("")),
        st.tuples(st.just("die"), st.integers(0, 3), st.just("")),
        st.tuples(st.just("live"), st.integers(0, 3), st.just("")),
    ),
    max_size=120,
)


@given(st.integers(1, 4), moves)
def test_router_chooses_no_engine_above_the_load_bound(num_engines: int, moves: list) -> None:  # type: ignore[type-arg]
    router = Router(num_engines, block_size=3, num_blocks=5)
    loads = [0] * num_engines
    lives = [True] * num_engines
    for what, value, namespace in moves:
        if what == "send":
            taking = [load if is_alive else None for load, is_alive in zip(loads, lives, strict=True)]
            if not any(lives):
                continue
            chosen = router.choose(value, namespace, taking)
            least = min(load for load in taking if load is not None)
            assert lives[chosen]
            assert loads[chosen] <= MAX_LEAD + 1.25 * least
            loads[chosen] += 1
            continue
        index = value % num_engines
        if what == "finish":
            loads[index] = max(0, loads[index] - 1)
        elif what == "die":
            lives[index], loads[index] = False, 0
            router.clear_index(index)
        else:
            lives[index] = True


@given(st.lists(st.tuples(prompts, st.sampled_from(["", "s"])), max_size=40), st.integers(1, 6))
def test_router_finds_only_blocks_sent_under_the_same_namespace(
    sent: list[tuple[list[int], str]], capacity: int
) -> None:
    blocks = SentBlocks(capacity, 2)
    everything = SentBlocks(10_000, 2)
    remembered: list[tuple[str, bytes]] = []  # the naive index: the least recently sent first
    for number, (prompt, namespace) in enumerate(sent):
        before = [full_blocks(one, 2) for one, other in sent[:number] if other == namespace]
        cut = full_blocks(prompt, 2)
        longest = max((common(cut, one) for one in before), default=0)
        found = [(namespace, cut[: BLOCK * (1 + index)]) in remembered for index in range(len(cut) // BLOCK)]
        assert blocks.num_found(cut, namespace) == [*found, False].index(False)
        assert blocks.num_found(cut, namespace) <= everything.num_found(cut, namespace) <= longest
        blocks.add(cut, namespace)
        everything.add(cut, namespace)
        now = [(namespace, cut[: BLOCK * (1 + index)]) for index in range(min(len(cut) // BLOCK, capacity))]
        remembered = ([one for one in remembered if one not in now] + now[::-1])[-capacity:]
        assert len(blocks) == len(remembered)
        assert blocks.num_found(cut, namespace) == min(len(cut) // BLOCK, capacity), "what was just sent is remembered"
        assert everything.num_found(cut, namespace) == len(cut) // BLOCK


def common(one: bytes, other: bytes) -> int:
    number = 0
    while number < min(len(one), len(other)) and one[number : number + BLOCK] == other[number : number + BLOCK]:
        number += BLOCK
    return number // BLOCK


def test_router_groups_equal_prefixes_and_spreads_new_ones() -> None:
    router = Router(2, block_size=4, num_blocks=1000)
    homes = {}
    for number in range(10):
        homes[number] = router.choose([number] * 41, "", [0, 0])
    assert sorted(homes.values()) == [0] * 5 + [1] * 5
    for number in range(10):
        assert router.choose([*([number] * 40), 99, 98], "", [0, 0]) == homes[number]
    # Another salt shares no blocks, and a load beyond the bound weighs more than any prefix.
    home = homes[3]
    loads: list[int | None] = [0, 0]
    loads[home] = MAX_LEAD + 1
    assert router.choose([3] * 41, "", loads) == 1 - home
    router.clear_index(home)
    loads[home] = 0
    assert router.choose([3] * 41, "", loads) == 1 - home, "it was sent there meanwhile"


def test_router_ignores_one_common_block_if_load_is_uneven() -> None:
    """A system prompt that all prompts begin with does not send all of them to one engine."""
    router = Router(2, block_size=16, num_blocks=1000)
    loads = [0, 0]
    for number in range(40):
        loads[router.choose([*range(16), *([100 + number] * 200)], "", loads)] += 1
    assert abs(loads[0] - loads[1]) <= 2
