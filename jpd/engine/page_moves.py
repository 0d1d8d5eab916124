"""Pages out of a KV pool into staging arrays, and back into another pool.

Staging arrays are of some layers, in the form that their wire says (see jpd.transfer.wire):
regrouped to the destination's page size, split as they travel, padded to a bucket, quantised if
asked for. A gather is queued before anything that writes the pool later, so the pages may be given
back as soon as it is dispatched. Knows no attempts and no transport. Called on the worker's thread.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpd.cache.kv_cache import POOL_AXES, KVCache, KVSpec
from jpd.cache.page_allocator import BIN_PAGE
from jpd.parallel.mesh import wire_view
from jpd.parallel.sharding import sharding_for
from jpd.transfer.checksum import part_sums, parts_agree, summed
from jpd.transfer.quantised import dequantise, quantise
from jpd.transfer.wire import Wire

Arrays = tuple[jax.Array, ...]


class PageMoves:
    """The compiled moves of one worker's pool."""

    def __init__(self, spec: KVSpec, mesh: Mesh) -> None:
        self._spec, self._mesh = spec, mesh
        self._parts = spec.kv_parts or (spec.kv_width,)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._pool = sharding_for(mesh, POOL_AXES, spec.layer_shape)
        self._gathers: dict[tuple[Wire, int], jax.stages.Wrapped] = {}
        self._scatter = jax.jit(
            self._scatter_pages,
            in_shardings=(self._pool, None, self._replicated),
            out_shardings=self._pool,
            donate_argnums=0,
        )

    def gather(
        self,
        cache: KVCache,
        page_ids: Sequence[int],
        wire: Wire,
        start: int = 0,
        num_pages: int | None = None,
        layers: range | None = None,
    ) -> Arrays:
        """Copy pages `start` to `start + num_pages` of a sequence to staging arrays.

        `page_ids` are the sequence's in this pool; start and num_pages count pages of the wire.
        `layers` None: all.
        """
        pages = cache.layers if layers is None else cache.part(layers)
        if num_pages is None:
            num_pages = len(page_ids) * self._spec.page_size // wire.page_size
        key = (wire, len(pages))
        if key not in self._gathers:
            self._gathers[key] = self._make_gather(*key)
        arrays: Arrays = self._gathers[key](pages, self._units(page_ids, wire, start, num_pages))
        return arrays

    def scatter(
        self,
        cache: KVCache,
        arrays: Sequence[jax.Array],
        page_ids: Sequence[int],
        layers: range | None = None,
    ) -> None:
        """Write arrays of an uncut wire into these pages of these layers; None: of all.

        Donates that part of `cache.layers`, and replaces it.
        """
        layers = cache.spec.all_layers if layers is None else layers
        padded = np.full(arrays[0].shape[0], BIN_PAGE, np.int32)
        padded[: len(page_ids)] = page_ids
        cache.replace(layers, self._scatter(cache.part(layers), tuple(arrays), padded))

    def warm_up_gather(self, cache: KVCache, wires: Iterable[Wire]) -> None:
        """Compile the gathers of every bucket for these wires."""
        for wire in dict.fromkeys(wires):
            for layers, size in self._kinds_of_pieces(wire):
                self.gather(cache, (), wire, 0, size, layers)

    def warm_up_scatter(self, cache: KVCache, wires: Iterable[Wire]) -> None:
        """Compile what these wires need on arrival, all buckets; writes the bin page only."""
        for wire in dict.fromkeys(wire.uncut for wire in wires):
            for layers, size in self._kinds_of_pieces(wire):
                arrays = self.gather(cache, (), wire, 0, size, layers)
                if wire.has_checksum:
                    runs = summed(arrays)
                    for data, sums in runs:
                        parts_agree(data, sums)
                    arrays = tuple(array for data, _ in runs for array in data)
                self.scatter(cache, arrays, (BIN_PAGE,) * size, layers)

    def _kinds_of_pieces(self, wire: Wire) -> Iterator[tuple[range, int]]:
        """Layers and pages of a piece of each shape; ranges of as many layers are of one."""
        ranges = wire.layer_ranges(self._spec.num_layers)
        first_of_size = {len(layers): layers for layers in reversed(ranges)}
        return itertools.product(first_of_size.values(), wire.move_sizes)

    def wire_sharding(self, partitions: int, num_heads: int | None = None) -> NamedSharding:
        """Of staging arrays on this mesh; `num_heads` are those of a slice."""
        heads = self._spec.num_cached_heads if num_heads is None else num_heads
        mesh = wire_view(self._mesh, partitions)
        return sharding_for(mesh, POOL_AXES, (1, 1, heads, 1))

    def _units(
        self, page_ids: Sequence[int], wire: Wire, start: int, num_pages: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        """Where each unit (the largest run of tokens that divides both page sizes) stands."""
        unit = math.gcd(self._spec.page_size, wire.page_size)
        per_page, per_wire_page = self._spec.page_size // unit, wire.page_size // unit
        units = np.full(wire.padded(num_pages) * per_wire_page, BIN_PAGE * per_page, np.int32)
        wanted = np.arange(start * per_wire_page, (start + num_pages) * per_wire_page)
        wanted = wanted[: max(0, len(page_ids) * per_page - start * per_wire_page)]
        pages = np.asarray(page_ids, np.int32)[wanted // per_page]
        units[: len(wanted)] = pages * per_page + wanted % per_page
        return units

    def _make_gather(self, wire: Wire, num_layers: int) -> jax.stages.Wrapped:
        heads = self._spec.num_cached_heads // wire.slices
        num_arrays = num_layers * wire.arrays_per_layer
        one = (self.wire_sharding(wire.partitions, heads),) * num_arrays
        sums = (self.wire_sharding(wire.partitions, wire.partitions),) * wire.has_checksum

        def gather(layers: Arrays, units: jax.Array) -> Arrays:
            return self._gather_pages(layers, units, wire)

        return jax.jit(
            gather,
            in_shardings=(self._pool, self._replicated),
            out_shardings=(one + sums) * wire.slices,
        )

    def _gather_pages(self, layers: Arrays, units: jax.Array, wire: Wire) -> Arrays:
        """Slice by slice: each is read where it stands, so that no byte is passed over twice."""
        arrays: list[jax.Array] = []
        for index in range(wire.slices):
            found: list[jax.Array] = []
            for pages in self._on_each_part(partial(read_heads, wire, index), layers, units):
                is_int8 = wire.dtype == "int8"
                found += quantise(pages, self._parts) if is_int8 else (pages.astype(wire.dtype),)
            cuts = [
                jax.lax.with_sharding_constraint(
                    array, self.wire_sharding(wire.partitions, array.shape[2])
                )
                for array in found
            ]
            arrays += cuts
            if wire.has_checksum:
                arrays.append(part_sums(cuts, wire.partitions))
        return tuple(arrays)

    def _scatter_pages(self, layers: Arrays, arrays: Arrays, page_ids: jax.Array) -> Arrays:
        """Strand by strand, each to its heads."""
        is_quantised = arrays[0].dtype == jnp.int8
        per_strand = len(layers) * (2 if is_quantised else 1)
        for strand in range(len(arrays) // per_strand):
            staged = arrays[strand * per_strand : (strand + 1) * per_strand]
            if is_quantised:
                pairs = zip(staged[::2], staged[1::2], strict=True)
                staged = tuple(dequantise(*pair, self._parts) for pair in pairs)
            write = partial(write_heads, strand)
            layers = self._on_each_part(write, (layers, staged), page_ids)
        return layers

    def _on_each_part(
        self, function: Callable[[Any, jax.Array], Arrays], arrays: object, places: jax.Array
    ) -> Arrays:
        """Call it for the heads that each device holds; what is local stays so, and in place."""
        heads = self._pool.spec
        local = jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(heads, PartitionSpec()),
            out_specs=heads,
            check_vma=False,
        )
        found: Arrays = local(arrays, places)
        return found


def read_heads(wire: Wire, index: int, layers: Arrays, units: jax.Array) -> Arrays:
    """Slice `index` of the heads of pages [P, p, K, W], in pages of the wire's size.

    A unit is a run of tokens that divides both page sizes.
    """
    num_pages, size, num_heads, width = layers[0].shape
    unit, num_cut = math.gcd(size, wire.page_size), num_heads // wire.slices
    cut = slice(index * num_cut, (index + 1) * num_cut)
    runs = (pages.reshape(num_pages * size // unit, unit, num_heads, width) for pages in layers)
    found = (run.at[units, :, cut].get(mode="promise_in_bounds") for run in runs)
    return tuple(pages.reshape(-1, wire.page_size, num_cut, width) for pages in found)


def write_heads(
    strand: int, layers_and_heads: tuple[Arrays, Arrays], page_ids: jax.Array
) -> Arrays:
    """Heads [n, p, K / strands, W] into those of pages [P, p, K, W] that are this strand's.

    Padding goes to the bin page, so an index may occur twice.
    """
    layers, staged = layers_and_heads
    num_heads = staged[0].shape[2]
    place = slice(strand * num_heads, (strand + 1) * num_heads)
    return tuple(
        pages.at[page_ids, :, place].set(heads.astype(pages.dtype), mode="promise_in_bounds")
        for pages, heads in zip(layers, staged, strict=True)
    )
