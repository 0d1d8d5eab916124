"""The KV pool of one worker: one array of pages per layer, on device in its final sharding.

A page holds K and V of `page_size` tokens side by side. Every update donates `layers`; the caller
puts the new arrays back. Knows no model and no page owner. Owned by its worker's thread.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jpd.parallel.sharding import sharding_for

POOL_AXES = ("pages", "page", "kv_heads", None)


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a KV pool; num_pages counts the bin page 0 too. Pure arithmetic."""

    num_layers: int
    num_pages: int
    page_size: int
    num_cached_heads: int
    kv_width: int  # numbers per token and cached head
    dtype: DTypeLike
    kv_parts: tuple[int, ...] = ()  # of kv_width: keys and values; (): all of one kind

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        """[P, p, K, W]"""
        return self.pages_shape(self.num_pages)

    def pages_shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """Shape of some pages of one layer, as they travel."""
        return (num_pages, self.page_size, self.num_cached_heads, self.kv_width)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and heads, counted once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        return self.num_layers * self.num_cached_heads * self.kv_width * itemsize

    @property
    def all_layers(self) -> range:
        return range(self.num_layers)

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size


class KVCache:
    """Holder of the pool's arrays; `layers` is replaced after each call that donates it."""

    def __init__(self, spec: KVSpec, mesh: Mesh) -> None:
        self.spec = spec
        self.mesh = mesh
        self.sharding: NamedSharding = sharding_for(mesh, POOL_AXES, spec.layer_shape)
        self.layers: tuple[jax.Array, ...] = self._make()

    def _make(self) -> tuple[jax.Array, ...]:
        """Zeroed on the devices themselves: unwritten pages are masked, but NaN times 0 is NaN."""

        def zeros() -> tuple[jax.Array, ...]:
            return tuple(
                jnp.zeros(self.spec.layer_shape, self.spec.dtype)
                for _ in range(self.spec.num_layers)
            )

        shardings = (self.sharding,) * self.spec.num_layers
        layers: tuple[jax.Array, ...] = jax.jit(zeros, out_shardings=shardings)()
        return layers

    def part(self, layers: range) -> tuple[jax.Array, ...]:
        """The pages of some layers."""
        return self.layers[layers.start : layers.stop]

    def replace(self, layers: range, pages: tuple[jax.Array, ...]) -> None:
        """Put back the pages of some layers."""
        self.layers = (*self.layers[: layers.start], *pages, *self.layers[layers.stop :])

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool, copies over replicas not counted."""
        return self.spec.num_pages * self.spec.page_bytes
