"""Floating-point weights → int8 with one scale per output channel, on the host or on devices.

Symmetric: a channel's largest number becomes 127 or -127, and the scale brings it back. Both ways
compute in float32, in the same steps, and give the same numbers. Called by `load`, `orbax_source`
and `convert`.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jpd.checkpoint.source import HostArray

STEP = np.float32(1 / 127)
"""Multiplied by, as are inverse scales: XLA rounds some divisions in another way than the host."""


def quantize(values: HostArray, summed: Sequence[int]) -> tuple[HostArray, HostArray]:
    """(int8 of the same shape, float32 scales): one scale for all numbers along `summed`."""
    dims = tuple(summed)
    high, low = (np.asarray(of(dims), np.float32) for of in (values.max, values.min))
    scale = np.maximum(high, -low) * STEP
    scale = np.where(scale == 0, np.float32(1), scale)
    inverse = np.expand_dims(np.float32(1) / scale, dims)
    numbers = np.empty(values.shape, np.int8)
    for index in range(values.shape[0]):  # by rows: temporary arrays stay small
        per_number = inverse[0 if inverse.shape[0] == 1 else index]
        numbers[index] = np.rint(values[index].astype(np.float32) * per_number)
    return numbers, scale


@functools.partial(jax.jit, static_argnames=("summed", "shardings"))
def _quantize(
    values: jax.Array, summed: tuple[int, ...], shardings: tuple[NamedSharding, NamedSharding]
) -> tuple[jax.Array, jax.Array]:
    scale = jnp.max(jnp.abs(values), summed) * STEP
    scale = jnp.where(scale == 0, jnp.float32(1), scale)
    inverse = jnp.expand_dims(jnp.float32(1) / scale, summed)
    numbers = jnp.rint(values * inverse).astype(jnp.int8)
    placed: tuple[jax.Array, jax.Array] = jax.lax.with_sharding_constraint(
        (numbers, scale), shardings
    )
    return placed


def quantize_on_devices(
    values: jax.Array, summed: tuple[int, ...], weight: NamedSharding, scale: NamedSharding
) -> tuple[jax.Array, jax.Array]:
    """The same for a float32 array that is on devices already, which is given up. Blocks."""
    made: tuple[jax.Array, jax.Array] = _quantize(values, summed, (weight, scale))
    jax.block_until_ready(made)
    values.delete()
    return made
