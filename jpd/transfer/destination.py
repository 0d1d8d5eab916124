"""Where the arrays of a piece belong on their destination's mesh, and how slices become one again.

Shared by all transports: each puts the arrays of a piece into `shardings`, whole or slice by slice,
and `join` makes of them what the destination's pool takes in. No bytes move in `join`.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
from jax.sharding import Mesh, NamedSharding

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
