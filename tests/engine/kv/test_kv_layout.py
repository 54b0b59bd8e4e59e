"""The layout of layers in blocks: no two layers share memory at the same time."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pointsman.core import ConfigError, KVGroup, SchedulerConfig
from pointsman.engine.kv.layout import KVLayout, LayerShape, choose_layout, layout_in_groups
from pointsman.engine.kv.pool import KVPool, bytes_per_block

SHAPE = LayerShape(1, 2, 3, 2)
FULL, WINDOW = KVGroup(), KVGroup("window", 32)


def config(**knobs: Any) -> SchedulerConfig:
    sizes = {"num_blocks": 1, "max_model_len": 256, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    return SchedulerConfig(**{**sizes, **knobs})


def layout_of(layers: Sequence[LayerShape], windows: Sequence[int | None], **knobs: Any) -> KVLayout:
    return layout_in_groups(layers, windows, config(**knobs), only_if_it_saves=True)


def test_window_and_full_layers_form_groups_of_equal_size() -> None:
    layout = layout_of([SHAPE] * 34, [32, 32, 32, 32, 32, None] * 5 + [32] * 4)
    assert layout.groups == (WINDOW,) * 6 + (FULL,) and len(layout.slots) == 5
    full = [place for index, place in enumerate(layout.places) if index % 6 == 5 and index < 30]
    assert [place.group for place in full] == [6] * 5 and [place.slot for place in full] == [0, 1, 2, 3, 4]


def test_a_window_as_long_as_the_context_is_full_attention() -> None:
    assert layout_of([SHAPE] * 2, [256, None]).groups == ()
    assert layout_of([SHAPE] * 2, [255, None]).groups == (), "a window of nearly everything"
    assert layout_of([SHAPE] * 3, [32, 256, None]).groups == (WINDOW, FULL, FULL)


def test_groups_that_save_no_memory_are_made_only_if_requested() -> None:
    """A window of 250 tokens may span all 64 blocks of 256."""
    near = KVGroup("window", 250)
    assert layout_in_groups([SHAPE] * 2, [250, None], config(), only_if_it_saves=True).groups == ()
    assert layout_in_groups([SHAPE] * 2, [250, None], config(), only_if_it_saves=False).groups == (near, FULL)


def test_layers_of_half_the_size_share_a_slot() -> None:
    large, small = LayerShape(2, 4, 6, 4), LayerShape(1, 4, 6, 4)
    layout = layout_of([small, small, large, small, small, large], [32, 32, None] * 2)
    assert layout.groups == (WINDOW, FULL) and len(layout.slots) == 2
    assert [(place.slot, place.part) for place in layout.places] == [(0, 0), (0, 1), (0, 0), (1, 0), (1, 1), (1, 0)]
    assert layout.num_parts_of_groups == (2, 1)
    other = LayerShape(1, 5, 5, 4)
    assert layout_of([other, large], [32, None]).groups == (), "keys and values are of other widths"


def test_a_block_has_memory_for_one_group_at_a_time() -> None:
    """Each layer of each group writes its own blocks; no write overwrites another."""
    choose = random.Random(5)
    for _ in range(20):
        large, small = LayerShape(2, 4, 6, 4), LayerShape(1, 4, 6, 4)
        layers = [choose.choice((large, small)) for _ in range(choose.randint(1, 14))]
        windows = [choose.choice((None, 8, 32)) for _ in layers]
        layout = layout_of(layers, windows)
        pool = KVPool(layers, num_blocks=9, block_size=2, dtype=torch.float32, layout=layout)
        assert pool.num_bytes == 9 * bytes_per_block(layout.slots, 2, torch.float32)
        group_of_block = [choose.randrange(max(1, len(layout.groups))) for _ in range(9)]
        marks: list[tuple[torch.Tensor, float]] = []
        for block, group in enumerate(group_of_block):
            for layer, place in enumerate(layout.places):
                if place.group == group:
                    at = block * layout.num_parts_of_groups[group]
                    for tensor in (pool.keys[layer][at], pool.values[layer][at]):
                        marks.append((tensor, float(len(marks) + 1)))
                        tensor.fill_(marks[-1][1])
        assert all((tensor == mark).all() for tensor, mark in marks), (layers, windows)
        places = [place[:3] for place in layout.places]
        assert len(set(places)) == len(places)


def test_disabling_the_hybrid_manager_keeps_one_group(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_layout([SHAPE] * 2, [32, None], config(), None).groups == (WINDOW, FULL)
    with caplog.at_level(logging.INFO):
        assert choose_layout([SHAPE] * 2, [32, None], config(), True) == KVLayout.without_groups([SHAPE] * 2)
    assert "the whole context: disable_hybrid_kv_cache_manager is True" in caplog.text
    with pytest.raises(ConfigError, match="disable_hybrid_kv_cache_manager is 'yes'; give True, False or None"):
        choose_layout([SHAPE] * 2, [32, None], config(), "yes")  # type: ignore[arg-type]


def test_capacity_is_logged_in_groups(caplog: pytest.LogCaptureFixture) -> None:
    layout = layout_of([SHAPE] * 6, [32] * 5 + [None])
    assert len(layout.slots) == 1
    settings = config(num_blocks=300, kv_groups=layout.groups)
    pool = KVPool([SHAPE] * 6, num_blocks=300, block_size=4, dtype=torch.float32, layout=layout)
    with caplog.at_level("INFO"):
        pool.log_capacity(settings)
    # 64 blocks of full attention and 9 of each window for one that decodes; 20 more for one that computes 16 tokens
    full_length = 1 + (300 - 129) / 109
    assert "300 blocks of 4 tokens in 5 groups of a window of 32, 1 of full attention" in caplog.text
    assert f"enough for {int(full_length * 256)} tokens, or 2.6 requests of the full length 256" in caplog.text
