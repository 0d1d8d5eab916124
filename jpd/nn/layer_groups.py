"""Layer groups: which layers of a model one call computes, before their KV leaves.

Groups of the same kinds of layers share an executable. Pure arithmetic, no jax. Read by the
engines, by whoever cuts pages into pieces, and by the planner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jpd.nn.config import LayerConfig


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of one model, in order; a single one is the whole model in one call."""

    ranges: tuple[range, ...] = ()  # (): all layers, however many
    num_kinds: int = 1  # of groups: each is an executable of its own

    @property
    def num_groups(self) -> int:
        return max(1, len(self.ranges))

    @property
    def is_whole(self) -> bool:
        """All layers are computed in one call."""
        return self.num_groups == 1

    @property
    def num_sizes(self) -> int:
        """Different numbers of layers: pages of each are moved by executables of their own."""
        return max(1, len({len(layers) for layers in self.ranges}))


def layer_ranges(num_layers: int, num_groups: int) -> tuple[range, ...]:
    """As even as they can be; the first ones have a layer more where the number does not divide."""
    if not 1 <= num_groups <= num_layers:
        raise ValueError(f"{num_groups} groups of {num_layers} layers")
    size, num_larger = divmod(num_layers, num_groups)
    ends = [size * (n + 1) + min(n + 1, num_larger) for n in range(num_groups)]
    return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))


def layer_groups(layers: Sequence[LayerConfig], num_groups: int) -> LayerGroups:
    """The groups of a model with these layers."""
    ranges = layer_ranges(len(layers), num_groups)
    return LayerGroups(ranges, len({kinds_of(layers, group) for group in ranges}))


def kinds_of(layers: Sequence[LayerConfig], group: range) -> tuple[LayerConfig, ...]:
    """What makes two groups equal: the same kinds of layers in the same order."""
    return tuple(layers[index] for index in group)
