"""A number for each part of a piece that any altered bit changes, made and compared on the devices.

Every part of the head axis has its own, so nothing is summed across devices: the comparison may
run on a transfer's thread beside the worker's. Called inside the source's gather, and by
CheckedTransfer.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

_ODD = 2654435761  # of Knuth's multiplicative hashing; odd factors lose no bit modulo 2^32


def part_sums(arrays: Sequence[jax.Array], num_parts: int) -> jax.Array:
    """uint32 [1, 1, num_parts, 1] of arrays [n, p, K, W]: what stands where, part by part."""
    total = jnp.zeros(num_parts, jnp.uint32)
    for index, array in enumerate(arrays):
        total = total * jnp.uint32(_ODD) + _sums(array, num_parts) + jnp.uint32(index)
    return total[None, None, :, None]


def _sums(array: jax.Array, num_parts: int) -> jax.Array:
    pages, page, heads, width = array.shape
    parts = _bits(array).reshape(pages, page, num_parts, heads // num_parts, width)
    shape = (pages, page, 1, heads // num_parts, width)
    place = jnp.arange(pages * page * (heads // num_parts) * width, dtype=jnp.uint32)
    weights = (place * jnp.uint32(_ODD) | jnp.uint32(1)).reshape(shape)
    return jnp.sum(parts * weights, axis=(0, 1, 3, 4), dtype=jnp.uint32)


def summed(arrays: Sequence[jax.Array]) -> list[tuple[tuple[jax.Array, ...], jax.Array]]:
    """Arrays of a piece as runs, each with the sums that stand behind it: strand by strand."""
    runs: list[tuple[tuple[jax.Array, ...], jax.Array]] = []
    run: list[jax.Array] = []
    for array in arrays:
        if array.dtype == jnp.uint32:
            runs.append((tuple(run), array))
            run = []
        else:
            run.append(array)
    return runs


def _bits(array: jax.Array) -> jax.Array:
    """The bits of every number, as uint32."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


@jax.jit
def parts_agree(arrays: tuple[jax.Array, ...], sums: jax.Array) -> jax.Array:
    """bool [1, 1, parts, 1]: whether the parts are as they were when `sums` was made."""
    return part_sums(arrays, sums.shape[2]) == sums
