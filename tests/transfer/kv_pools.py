"""Pools with recognisable numbers, and the gather and scatter around a transfer."""

import math
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jpd.parallel.mesh import kv_partitions, make_worker_mesh, wire_view
from jpd.parallel.sharding import sharding_for
from jpd.transfer.protocol import ArrivedPiece, KVPiece

AXES = ("pages", "page", "kv_heads", None)
NUM_PAGES, PAGE_SIZE, WIDTH, NUM_LAYERS = 7, 2, 3, 2


@dataclass(frozen=True)
class Side:
    """One worker's mesh and its pool, one array per layer."""

    mesh: Mesh
    layers: tuple[jax.Array, ...]

    @property
    def sharding(self) -> NamedSharding:
        sharding = self.layers[0].sharding
        assert isinstance(sharding, NamedSharding)
        return sharding


def make_side(
    first_device: int, tensor: int, num_heads: int, *, seed: int, expert: int = 1
) -> Side:
    devices = jax.devices()[first_device : first_device + tensor * expert]
    mesh = make_worker_mesh(devices, tensor=tensor, expert=expert, num_cached_heads=num_heads)
    shape = (NUM_PAGES, PAGE_SIZE, num_heads, WIDTH)
    values = np.random.default_rng(seed).normal(size=(NUM_LAYERS, *shape)).astype(np.float32)
    sharding = sharding_for(mesh, AXES, shape)
    return Side(mesh, tuple(jax.device_put(layer, sharding) for layer in values))


def wire_sharding(side: Side, partitions: int) -> NamedSharding:
    shape = side.layers[0].shape
    return sharding_for(wire_view(side.mesh, partitions), AXES, shape)


def wire_partitions(source: Side, target: Side) -> int:
    return math.gcd(kv_partitions(source.mesh), kv_partitions(target.mesh))


def gather(side: Side, page_ids: np.ndarray, partitions: int) -> tuple[jax.Array, ...]:
    def take(layers: tuple[jax.Array, ...], ids: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(layer[ids] for layer in layers)

    return jax.jit(take, out_shardings=wire_sharding(side, partitions))(side.layers, page_ids)


def scatter(
    side: Side, staging: tuple[jax.Array, ...], page_ids: np.ndarray
) -> tuple[jax.Array, ...]:
    """The pool with the pages written. Donates the pool."""

    def put(
        layers: tuple[jax.Array, ...], pages: tuple[jax.Array, ...], ids: jax.Array
    ) -> tuple[jax.Array, ...]:
        return tuple(layer.at[ids].set(new) for layer, new in zip(layers, pages, strict=True))

    jitted = jax.jit(put, donate_argnums=0, out_shardings=side.sharding)
    return jitted(side.layers, staging, jnp.asarray(page_ids))


def piece_of(
    arrays: tuple[jax.Array, ...],
    destination: str,
    *,
    attempt_id: str = "a",
    page_start: int = 0,
    offered_time: float | None = None,
) -> KVPiece:
    return KVPiece(
        attempt_id=attempt_id,
        destination=destination,
        page_start=page_start,
        num_pages=arrays[0].shape[0],
        arrays=arrays,
        num_bytes=sum(array.nbytes for array in arrays),
        is_last=True,
        offered_time=time.monotonic() if offered_time is None else offered_time,
    )


def assert_same_piece(piece: KVPiece, arrived: ArrivedPiece) -> None:
    assert arrived.error is None
    assert (arrived.attempt_id, arrived.page_start, arrived.num_pages, arrived.num_bytes) == (
        piece.attempt_id,
        piece.page_start,
        piece.num_pages,
        piece.num_bytes,
    )
    for sent, received in zip(piece.arrays, arrived.arrays, strict=True):
        np.testing.assert_array_equal(np.asarray(sent), np.asarray(received))
