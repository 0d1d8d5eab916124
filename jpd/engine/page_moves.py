"""Pages out of a KV pool into staging arrays, and back into another pool.

Staging arrays are in the wire view of their mesh (see jpd.parallel.mesh), padded to a bucket. A
gather is queued before anything that writes the pool later, so the pages may be given back as soon
as it is dispatched. Knows no attempts and no transport. Called by the engines, on the worker's
thread.
"""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpd.cache.kv_cache import POOL_AXES, KVCache, KVSpec
from jpd.cache.page_allocator import BIN_PAGE
from jpd.engine.buckets import ShapeBuckets
from jpd.parallel.mesh import wire_view
from jpd.parallel.sharding import sharding_for

Arrays = tuple[jax.Array, ...]


class PageMoves:
    """The compiled moves of one worker's pool."""

    def __init__(self, spec: KVSpec, mesh: Mesh, buckets: ShapeBuckets) -> None:
        self._spec, self._mesh, self._buckets = spec, mesh, buckets
        self._replicated = NamedSharding(mesh, jax.sharding.PartitionSpec())
        self._pool = (sharding_for(mesh, POOL_AXES, spec.layer_shape),) * spec.num_layers
        self._gathers: dict[int, jax.stages.Wrapped] = {}
        self._scatter = jax.jit(
            scatter_pages,
            in_shardings=(self._pool, None, self._replicated),
            out_shardings=self._pool,
            donate_argnums=0,
        )

    def gather(self, cache: KVCache, page_ids: Sequence[int], wire_partitions: int) -> Arrays:
        """Copy pages to staging arrays [n, p, K, W] per layer, padded with rubbish."""
        gather = self._gather(wire_partitions)
        arrays: Arrays = gather(cache.layers, self._padded(page_ids))
        return arrays

    def scatter(self, cache: KVCache, arrays: Sequence[jax.Array], page_ids: Sequence[int]) -> None:
        """Write staging arrays into these pages. Donates `cache.layers` and replaces it."""
        padded = np.full(arrays[0].shape[0], BIN_PAGE, np.int32)
        padded[: len(page_ids)] = page_ids
        cache.layers = self._scatter(cache.layers, tuple(arrays), padded)

    def warm_up_gather(self, cache: KVCache, wire_partitions: Iterable[int]) -> None:
        """Compile the gathers of every bucket for these wires."""
        for partitions in sorted(set(wire_partitions)):
            for size in self._buckets.page_moves:
                self.gather(cache, (BIN_PAGE,) * size, partitions)

    def warm_up_scatter(self, cache: KVCache, wire_partitions: Iterable[int]) -> None:
        """Compile the scatters of every bucket for these wires; writes the bin page only."""
        for partitions in sorted(set(wire_partitions)):
            for size in self._buckets.page_moves:
                arrays = self.gather(cache, (BIN_PAGE,) * size, partitions)
                self.scatter(cache, arrays, (BIN_PAGE,) * size)

    def wire_sharding(self, wire_partitions: int) -> NamedSharding:
        mesh = wire_view(self._mesh, wire_partitions)
        return sharding_for(mesh, POOL_AXES, self._spec.layer_shape)

    def _gather(self, wire_partitions: int) -> jax.stages.Wrapped:
        if wire_partitions not in self._gathers:
            self._gathers[wire_partitions] = jax.jit(
                gather_pages,
                in_shardings=(self._pool, self._replicated),
                out_shardings=(self.wire_sharding(wire_partitions),) * self._spec.num_layers,
            )
        return self._gathers[wire_partitions]

    def _padded(self, page_ids: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        padded = np.full(self._buckets.move_size(len(page_ids)), BIN_PAGE, np.int32)
        padded[: len(page_ids)] = page_ids
        return padded


def gather_pages(layers: Arrays, page_ids: jax.Array) -> Arrays:
    return tuple(pages.at[page_ids].get(mode="promise_in_bounds") for pages in layers)


def scatter_pages(layers: Arrays, arrays: Arrays, page_ids: jax.Array) -> Arrays:
    """Padding goes to the bin page, so an index may occur twice."""
    return tuple(
        pages.at[page_ids].set(staged.astype(pages.dtype), mode="promise_in_bounds")
        for pages, staged in zip(layers, arrays, strict=True)
    )
