"""The gated feed-forward network of a dense layer, and of the experts that all tokens share."""

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.nn.config import Activation
from jpd.nn.layers import activation, param
from jpd.nn.linear import Linear


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        embed_dim: int,
        mlp_dim: int,
        dtype: jnp.dtype,
        *,
        act: Activation,
        bias: bool,
        int8: bool,
    ) -> None:
        into, out = (embed_dim, mlp_dim), (mlp_dim, embed_dim)
        self.gate = Linear("btd,df->btf", into, dtype, ("embed", "mlp"), int8=int8)
        self.up = Linear("btd,df->btf", into, dtype, ("embed", "mlp"), int8=int8)
        self.down = Linear("btf,fd->btd", out, dtype, ("mlp", "embed"), int8=int8)
        self.has_bias = bias
        if bias:
            self.gate_bias = param((mlp_dim,), dtype, ("mlp",))
            self.up_bias = param((mlp_dim,), dtype, ("mlp",))
            self.down_bias = param((embed_dim,), dtype, ("embed",))
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate(x), self.up(x)
        if self.has_bias:
            gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
        out = self.down(activation(self.act)(gate) * up)
        return out + self.down_bias[...] if self.has_bias else out
