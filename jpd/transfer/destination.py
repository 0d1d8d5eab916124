"""Where the arrays of a piece belong on their destination, and how parts become arrays again.

Shared by all transports: each puts the arrays of a piece into `shardings`, whole or slice by slice,
and `join` makes of them what the destination's pool takes in; or, where parts of the wire are
smaller than the target's, puts each part on its own and `weave` makes strands of them. Only `weave`
and `put` move bytes.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jpd.cache.kv_cache import POOL_AXES
from jpd.parallel.mesh import slice_views, wire_view
from jpd.parallel.sharding import sharding_for
from jpd.transfer.wire import Wire


class Shaped(Protocol):
    """An array, or what describes one."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Destination:
    """One worker's mesh as the target of pieces. Not thread-safe: one thread pulls for a worker."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._views: dict[tuple[int, int], tuple[Mesh, ...]] = {}

    def put(self, wire: Wire, arrays: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Arrays of a piece, from devices or from the host, as the uncut wire has them. Blocks."""
        if wire.strands > 1:
            parts = [part for array in arrays for part in parts_of(array, wire.partitions)]
            return self.weave(wire, arrays, parts)
        moved = jax.device_put(tuple(arrays), self.shardings(wire, arrays))
        jax.block_until_ready(moved)
        return self.join(wire, moved)

    def weave(
        self, wire: Wire, arrays: Sequence[Shaped], parts: Sequence[Any]
    ) -> tuple[jax.Array, ...]:
        """The strands of `arrays`, made of their parts, array by array. Blocks.

        Part k of an array belongs to part k // strands of the target, and to strand k % strands.
        """
        places = [
            (index * wire.partitions + k, device)
            for index in range(len(arrays))
            for k, devices in enumerate(self.holders(wire))
            for device in devices
        ]
        copies = jax.device_put(
            [parts[place] for place, _ in places],
            [SingleDeviceSharding(device) for _, device in places],
        )
        jax.block_until_ready(copies)
        found: dict[tuple[int, int], list[jax.Array]] = {}
        for (place, _), copy in zip(places, copies, strict=True):
            index, k = divmod(place, wire.partitions)
            found.setdefault((k % wire.strands, index), []).append(copy)
        return tuple(
            self._strand(wire, arrays[index].shape, found[strand, index])
            for strand in range(wire.strands)
            for index in range(len(arrays))
        )

    def holders(self, wire: Wire) -> list[list[jax.Device]]:
        """For each part of a wire with strands, the devices that need it."""
        num_parts = wire.partitions // wire.strands
        devices = wire_view(self._mesh, num_parts).devices  # data, expert, tensor, replica
        return [list(devices[:, :, k // wire.strands].flat) for k in range(wire.partitions)]

    def _strand(self, wire: Wire, shape: tuple[int, ...], copies: Sequence[jax.Array]) -> jax.Array:
        pages, page, heads, width = shape
        strand = (pages, page, heads // wire.strands, width)
        view = wire_view(self._mesh, wire.partitions // wire.strands)
        return jax.make_array_from_single_device_arrays(
            strand, sharding_for(view, POOL_AXES, strand), list(copies)
        )

    def shardings(self, wire: Wire, arrays: Sequence[Shaped]) -> tuple[NamedSharding, ...]:
        """Where each array of a piece goes; arrays stand slice by slice."""
        views = self._slice_views(wire)
        per_slice = len(arrays) // wire.slices
        return tuple(
            sharding_for(views[index // per_slice], POOL_AXES, array.shape)
            for index, array in enumerate(arrays)
        )

    def join(self, wire: Wire, moved: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The arrays of the uncut wire, made of the slices that lie on their devices already."""
        if wire.slices == 1:
            return tuple(moved)
        per_slice = len(moved) // wire.slices
        return tuple(
            self._joined(wire, [moved[index + per_slice * cut] for cut in range(wire.slices)])
            for index in range(per_slice)
        )

    def _joined(self, wire: Wire, slices: Sequence[jax.Array]) -> jax.Array:
        pages, page, heads, width = slices[0].shape
        shape = (pages, page, heads * wire.slices, width)
        view = wire_view(self._mesh, wire.partitions * wire.slices)
        shards = [shard.data for cut in slices for shard in cut.addressable_shards]
        sharding = sharding_for(view, POOL_AXES, shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _slice_views(self, wire: Wire) -> tuple[Mesh, ...]:
        key = (wire.partitions, wire.slices)
        if key not in self._views:
            self._views[key] = slice_views(self._mesh, *key)
        return self._views[key]


def parts_of(array: Any, num_parts: int) -> list[Any]:
    """One copy of each part of the head axis, in order; of an array of the host or of devices."""
    if isinstance(array, np.ndarray):
        return np.split(array, num_parts, axis=2)
    return distinct_shards(array)


def distinct_shards(array: jax.Array) -> list[jax.Array]:
    """One copy of each part of an array, in the order of the parts."""
    first = {part_start(shard.index): shard.data for shard in reversed(array.addressable_shards)}
    return [first[start] for start in sorted(first)]


def part_start(index: tuple[slice, ...]) -> int:
    """Where a part of the head axis begins."""
    return int(index[2].start or 0)
