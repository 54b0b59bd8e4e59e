"""Division of layers into groups of equal size, and the names of groups."""

from __future__ import annotations

import random

import pytest

from pointsman.core import KVGroup
from pointsman.core.state.layout import FULL, describe_groups, layers_per_group

WINDOW = KVGroup("window", 1024)


@pytest.mark.parametrize(
    ("name", "full", "windowed", "size"),
    [
        ("five to one", 8, 40, 8),  # Gemma 3 12B
        ("one layer is wasted", 5, 29, 5),  # Gemma 3 4B
        ("two layers are wasted", 4, 22, 4),  # Gemma 3 1B
        ("equal numbers", 12, 12, 12),  # gpt-oss 20B
        ("three to one", 8, 24, 8),
        ("one more with a window", 12, 13, 4),
        ("windows alone", 0, 32, 32),
    ],
)
def test_the_number_of_layers_per_group_minimizes_wasted_memory(name: str, full: int, windowed: int, size: int) -> None:
    """A request has 32,768 tokens in blocks of 16; a window holds 65 of these blocks."""
    kinds = [(blocks, layers) for blocks, layers in ((2048, full), (65, windowed)) if layers]
    assert layers_per_group(kinds, 8) == size


def test_no_other_number_of_layers_per_group_needs_less_memory() -> None:
    choose = random.Random(1)
    for _ in range(200):
        kinds = [(choose.randint(1, 100), choose.randint(1, 40)) for _ in range(choose.randint(1, 3))]
        costs: dict[int, tuple[int, int]] = {}  # for each size, the KV and the number of groups
        for size in range(1, 41):
            counts = [-(-layers // size) for _, layers in kinds]
            if sum(counts) <= 8:
                costs[size] = (
                    size * sum(one * blocks for one, (blocks, _) in zip(counts, kinds, strict=True)),
                    sum(counts),
                )
        assert costs[layers_per_group(kinds, 8)] == min(costs.values()), kinds


def test_each_kind_of_layers_gets_one_group_if_kinds_exceed_max_groups() -> None:
    assert layers_per_group([(10 + size, 3) for size in range(5)], 4) == 3


def test_describe_groups_lists_kv_groups_in_words() -> None:
    assert describe_groups(()) == "1 group of full attention"
    assert describe_groups((WINDOW, FULL, WINDOW)) == "2 groups of a window of 1024, 1 of full attention"
    assert describe_groups((KVGroup("chunk", 8),)) == "1 group of a chunk of 8"
