"""Weights of matrix products, in floating point or as int8 with a scale per output channel.

int8 weights are brought back inside the product, so that no floating-point copy of them outlives
it; `jpd.checkpoint.int8` makes them. Used by every module of `jpd.nn` that has a matrix.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.nn.layers import Axes, param


class Linear(nnx.Module):
    """x times a weight, as an einsum says: "btd,dkgh->btkgh".

    What the product does not sum over are output channels: the last dims of the result, in the
    weight's order. An int8 weight has one float32 scale for each.
    """

    def __init__(
        self, product: str, shape: tuple[int, ...], dtype: jnp.dtype, axes: Axes, *, int8: bool
    ) -> None:
        inputs, result = product.split("->")
        letters = inputs.split(",")[1]
        kept = [dim for dim, letter in enumerate(letters) if letter in result]
        assert result.endswith("".join(letters[dim] for dim in kept)), product
        self.product, self.int8, self.dtype = product, int8, dtype
        if int8:
            summed = tuple(dim for dim in range(len(shape)) if dim not in kept)
            channels, names = (tuple(of[dim] for dim in kept) for of in (shape, axes))
            self.weight = param(shape, jnp.dtype(jnp.int8), axes, summed=summed)
            self.scale = param(channels, jnp.dtype(jnp.float32), names)  # type: ignore[arg-type]
        else:
            self.weight = param(shape, dtype, axes)

    def __call__(self, x: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
        """In `dtype`, or that of x."""
        weight = self.weight[...]
        if not self.int8:
            return jnp.einsum(self.product, x, weight, preferred_element_type=dtype)
        wide = jnp.dtype(jnp.float32)
        sums = jnp.einsum(self.product, x, weight.astype(x.dtype), preferred_element_type=wide)
        return (sums * self.scale[...]).astype(dtype or x.dtype)

    def of_one(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """x [R, in] times part `index` of a weight [parts, in, out]."""
        weight = self.weight[...][index]
        if not self.int8:
            return x @ weight
        sums = jnp.matmul(x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        return (sums * self.scale[...][index]).astype(x.dtype)


class Embedding(Linear):
    """One row per token of the vocabulary, which is also its column of the logits."""

    def __init__(self, vocab_size: int, embed_dim: int, dtype: jnp.dtype, *, int8: bool) -> None:
        shape, axes = (vocab_size, embed_dim), ("vocab", "embed")
        super().__init__("...d,vd->...v", shape, dtype, axes, int8=int8)

    def rows(self, tokens: jax.Array) -> jax.Array:
        """int32 tokens [B, T] → [B, T, D]."""
        found = self.weight[...][tokens]
        if not self.int8:
            return found
        wide = found.astype(jnp.float32) * self.scale[...][tokens][..., None]
        return wide.astype(self.dtype)
