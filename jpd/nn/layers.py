"""Small layers: how a parameter is declared, RMS norm, activations, soft cap.

Knows no model and no mesh. Used by every module of `jpd.nn`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.nn.config import Activation

Axes = tuple[str, ...]


def param(
    shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes, summed: tuple[int, ...] = ()
) -> nnx.Param[jax.Array]:
    """A parameter without memory: shape, dtype and one logical axis name per dimension.

    `summed`: of an int8 weight, the dims that share one scale.
    """
    assert len(shape) == len(axes)
    value: Any = jax.ShapeDtypeStruct(shape, dtype)
    return nnx.Param(value, axes=axes, summed=summed)


class RMSNorm(nnx.Module):
    """x / rms(x) * (weight + offset) over as many last dims as `shape` has, in float32."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: jnp.dtype,
        axes: Axes,
        *,
        eps: float,
        offset: float = 0.0,
    ) -> None:
        self.weight = param(shape, dtype, axes)
        self.eps, self.offset = eps, offset
        self.reduced = tuple(range(-len(shape), 0))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=self.reduced, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.eps)
        return (normed * (self.weight[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


def softcap(x: jax.Array, cap: float) -> jax.Array:
    """x squeezed smoothly into (-cap, cap); cap 0 leaves it alone."""
    return jnp.tanh(x / cap) * cap if cap else x


def activation(name: Activation) -> Callable[[jax.Array], jax.Array]:
    """The nonlinearity of the gate."""
    match name:
        case "silu":
            return jax.nn.silu
        case "gelu_tanh":
            return lambda x: jax.nn.gelu(x, approximate=True)
        case "gelu":
            return lambda x: jax.nn.gelu(x, approximate=False)
