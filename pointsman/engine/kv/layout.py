"""Which layers keep their KV in the same blocks, and where in the memory of a block?

Layers that attend alike, to everything or to a window, are in groups of equal size; each group has a block table of its
own, and the blocks of all groups are from one pool. A block has memory for one group, whichever it is: it consists of
slots, and each group uses a slot for a layer.

    34 layers, five of six with a window       slot 0      slot 1     ...     slot 4
    group 0, window                           layer 0     layer 1            layer 4
    ...
    group 5, window                          layer 30    layer 31                  -
    group 6, full attention                   layer 5    layer 11           layer 29

Where some layers keep less per token than others, by a whole factor, a slot has several of them, its parts. Without
groups every layer has a slot of its own, and all keep the whole context.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pointsman.core import KVGroup, SchedulerConfig
from pointsman.core.state.layout import FULL, layers_per_group
from pointsman.engine.params.engine_args import wants_one_group

logger = logging.getLogger(__name__)

MAX_GROUPS = 8
"""Each group takes time in every step: its blocks, and its inputs of the attention."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token, as seen when the model was probed."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    num_heads: int
    """Query heads; a multiple of `num_kv_heads`."""

    @property
    def num_keys(self) -> int:
        """Elements of a token's keys."""
        return self.num_kv_heads * self.k_dim

    @property
    def num_values(self) -> int:
        """Elements of a token's values."""
        return self.num_kv_heads * self.v_dim

    @property
    def num_elements(self) -> int:
        """Of a token, keys and values."""
        return self.num_keys + self.num_values


class Place(NamedTuple):
    """Where a layer keeps its KV."""

    group: int
    slot: int
    part: int = 0
    """Of the slot, which has `num_parts` for such layers."""
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where the layers of a model keep their KV."""

    groups: tuple[KVGroup, ...]
    """`SchedulerConfig.kv_groups`; (): one group of full attention."""
    places: tuple[Place, ...]
    """[layers]"""
    slots: tuple[LayerShape, ...]
    """[slots of a block] the shape of the largest layer there."""

    @classmethod
    def plain(cls, layers: Sequence[LayerShape]) -> KVLayout:
        """All layers in one group of full attention."""
        return cls((), tuple(Place(0, slot) for slot in range(len(layers))), tuple(layers))

    @property
    def parts_of(self) -> tuple[int, ...]:
        """[groups] the parts of a slot for layers of the group."""
        parts = {place.group: place.num_parts for place in self.places}
        return tuple(parts[group] for group in sorted(parts))


def choose_layout(
    layers: Sequence[LayerShape],
    windows: Sequence[int | None],
    config: SchedulerConfig,
    disable: bool | None,
) -> KVLayout:
    """The layout of a model's KV, as the arguments of `Engine` say; the log says why windows save nothing.

    Args:
        windows: see `layout_in_groups`.
        disable: `disable_hybrid_kv_cache_manager`.

    Raises:
        ConfigError: `disable` is no such value.
    """
    why_not = "disable_hybrid_kv_cache_manager is True" if wants_one_group(disable) else None
    if not any(window is not None and window < config.max_model_len for window in windows):
        return KVLayout.plain(layers)
    if why_not is None:
        layout = layout_in_groups(layers, windows, config, only_if_it_saves=disable is None)
        if layout.groups:
            return layout
        why_not = "groups of layers would take no less memory, or their KV is of sizes that do not fit one pool"
    logger.info("layers with a sliding window keep the KV of the whole context: %s", why_not)
    return KVLayout.plain(layers)


def layout_in_groups(
    layers: Sequence[LayerShape], windows: Sequence[int | None], config: SchedulerConfig, *, only_if_it_saves: bool
) -> KVLayout:
    """The layout in groups with which a request of the longest length holds the least memory while it decodes.

    It is the plain one if no layer has a window below that length, or where some layers keep less per token than
    others, and not by a whole factor.

    Args:
        windows: [layers] tokens to which a token attends, its own included; None: all.
        config: whose number of blocks is not read.
        only_if_it_saves: the plain layout also where groups take no less memory.
    """
    max_model_len = config.max_model_len
    largest = max(layers, key=lambda shape: shape.num_elements)
    members: dict[tuple[KVGroup, int], list[int]] = {}
    for index, (shape, window) in enumerate(zip(layers, windows, strict=True)):
        group = FULL if window is None or window >= max_model_len else KVGroup("window", window)
        members.setdefault((group, _num_parts(shape, largest)), []).append(index)
    plain = KVLayout.plain(layers)
    if all(group.is_full for group, _ in members) or any(num_parts == 0 for _, num_parts in members):
        return plain
    kinds = [
        (config.replace(kv_groups=(group,)).decode_blocks(max_model_len), -(-len(those) // num_parts))
        for (group, num_parts), those in members.items()
    ]
    size = layers_per_group(kinds, MAX_GROUPS)
    groups: list[KVGroup] = []
    places: dict[int, Place] = {}
    for (group, num_parts), those in members.items():
        for at, index in enumerate(those):
            number, within = divmod(at, size * num_parts)
            places[index] = Place(len(groups) + number, within // num_parts, within % num_parts, num_parts)
        groups += [group] * (1 + (len(those) - 1) // (size * num_parts))
    layout = KVLayout(tuple(groups), tuple(places[index] for index in range(len(layers))), (largest,) * size)

    def num_elements(one: KVLayout) -> int:
        """In the blocks of such a request, for each of their tokens."""
        num_blocks = config.replace(kv_groups=one.groups).decode_blocks(max_model_len)
        return num_blocks * sum(shape.num_elements for shape in one.slots)

    return plain if only_if_it_saves and num_elements(layout) >= num_elements(plain) else layout


def _num_parts(shape: LayerShape, largest: LayerShape) -> int:
    """How many layers of a shape fill the memory of the largest one; 0: they do not."""
    parts = largest.num_keys // shape.num_keys
    fill = parts * shape.num_keys == largest.num_keys and parts * shape.num_values == largest.num_values
    return parts if fill else 0
