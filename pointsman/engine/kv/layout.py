"""KVLayout: assigns the layers of a model to groups with a block table each, and to memory within a block.

Each group has layers with the same attention (full, or the same window), and all groups have the same number of layers.
Each group has its own block table, and all groups take their blocks from one pool. A block consists of slots and serves
one group at a time, which uses one slot per layer.

    34 layers, five of six with a window       slot 0      slot 1     ...     slot 4
    group 0, window                           layer 0     layer 1            layer 4
    ...
    group 5, window                          layer 30    layer 31                  -
    group 6, full attention                   layer 5    layer 11           layer 29

Where some layers keep less KV per token than other layers, by an integer factor, a slot holds several of the smaller
layers, as its parts. Without groups every layer has its own slot, and all keep the whole context.
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
"""Maximum number of groups. In every step the scheduler and the attention inputs take additional time for each
group."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one attention layer's KV per token, as measured in a trial run of the model."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    num_heads: int
    """Number of query heads; a multiple of `num_kv_heads`."""

    @property
    def num_keys(self) -> int:
        """Number of elements of one token's keys."""
        return self.num_kv_heads * self.k_dim

    @property
    def num_values(self) -> int:
        """Number of elements of one token's values."""
        return self.num_kv_heads * self.v_dim

    @property
    def num_elements(self) -> int:
        """Number of elements of one token's keys and values."""
        return self.num_keys + self.num_values


class Place(NamedTuple):
    """The place of one layer's KV in a block: a part of a slot, for the blocks of the layer's group."""

    group: int
    slot: int
    part: int = 0
    """Number of the layer's part within its slot, from 0 to `num_parts` - 1."""
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The groups of a model's layers, and the place of each layer's KV in a block."""

    groups: tuple[KVGroup, ...]
    """Value of `SchedulerConfig.kv_groups`; (): one group of full attention."""
    places: tuple[Place, ...]
    """[layers] the place of each layer's KV in a block."""
    slots: tuple[LayerShape, ...]
    """[slots of a block] the shape of the largest layer that the slot can hold."""

    @classmethod
    def without_groups(cls, layers: Sequence[LayerShape]) -> KVLayout:
        """The layout with all layers in one group of full attention, and one slot per layer."""
        return cls((), tuple(Place(0, slot) for slot in range(len(layers))), tuple(layers))

    @property
    def num_parts_of_groups(self) -> tuple[int, ...]:
        """[groups] number of parts into which a slot is divided for layers of the group."""
        parts = {place.group: place.num_parts for place in self.places}
        return tuple(parts[group] for group in sorted(parts))


def choose_layout(
    layers: Sequence[LayerShape],
    windows: Sequence[int | None],
    config: SchedulerConfig,
    disable: bool | None,
) -> KVLayout:
    """Choose the layout of a model's KV by the arguments of `Engine`. If layers with windows keep the whole context,
    the reason is logged.

    Args:
        windows: sliding window of each layer, see `layout_in_groups`.
        disable: value of the engine's argument `disable_hybrid_kv_cache_manager`.

    Raises:
        ConfigError: `disable` is not True, False or None.
    """
    why_not = "disable_hybrid_kv_cache_manager is True" if wants_one_group(disable) else None
    if not any(window is not None and window < config.max_model_len for window in windows):
        return KVLayout.without_groups(layers)
    if why_not is None:
        layout = layout_in_groups(layers, windows, config, only_if_it_saves=disable is None)
        if layout.groups:
            return layout
        why_not = "groups of layers would not save memory, or KV of different sizes cannot share one pool"
    logger.info("layers with a sliding window keep the KV of the whole context: %s", why_not)
    return KVLayout.without_groups(layers)


def layout_in_groups(
    layers: Sequence[LayerShape], windows: Sequence[int | None], config: SchedulerConfig, *, only_if_it_saves: bool
) -> KVLayout:
    """Choose the layout in groups with which a decoding request of maximum length takes the least memory.

    The result is the plain layout if no layer has a window below the maximum length, or if the layers' sizes per token
    differ by a factor that is not an integer.

    Args:
        windows: [layers] number of tokens to which a token attends, itself included; None: all tokens.
        config: the scheduler's configuration; its `num_blocks` is not read.
        only_if_it_saves: whether to return the plain layout also if groups take no less memory.
    """
    max_model_len = config.max_model_len
    largest = max(layers, key=lambda shape: shape.num_elements)
    members: dict[tuple[KVGroup, int], list[int]] = {}
    for index, (shape, window) in enumerate(zip(layers, windows, strict=True)):
        group = FULL if window is None or window >= max_model_len else KVGroup("window", window)
        members.setdefault((group, _num_parts(shape, largest)), []).append(index)
    plain = KVLayout.without_groups(layers)
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
        """Number of elements of all blocks of a decoding request of maximum length with the layout `one`, divided by
        the block size."""
        num_blocks = config.replace(kv_groups=one.groups).decode_blocks(max_model_len)
        return num_blocks * sum(shape.num_elements for shape in one.slots)

    return plain if only_if_it_saves and num_elements(layout) >= num_elements(plain) else layout


def _num_parts(shape: LayerShape, largest: LayerShape) -> int:
    """Number of layers of a shape that together fill the slot of the largest layer exactly; 0: no number does."""
    parts = largest.num_keys // shape.num_keys
    fill = parts * shape.num_keys == largest.num_keys and parts * shape.num_values == largest.num_values
    return parts if fill else 0
