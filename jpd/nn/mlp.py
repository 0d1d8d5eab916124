"""The gated feed-forward network of a dense layer, and of the experts that all tokens share."""

import jax
import jax.numpy as jnp
from flax import nnx

from jpd.nn.config import Activation
from jpd.nn.layers import activation, param


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self, embed_dim: int, mlp_dim: int, dtype: jnp.dtype, *, act: Activation, bias: bool = False
    ) -> None:
        self.gate = param((embed_dim, mlp_dim), dtype, ("embed", "mlp"))
        self.up = param((embed_dim, mlp_dim), dtype, ("embed", "mlp"))
        self.down = param((mlp_dim, embed_dim), dtype, ("mlp", "embed"))
        self.has_bias = bias
        if bias:
            self.gate_bias = param((mlp_dim,), dtype, ("mlp",))
            self.up_bias = param((mlp_dim,), dtype, ("mlp",))
            self.down_bias = param((embed_dim,), dtype, ("embed",))
        self.act = act

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = x @ self.gate[...], x @ self.up[...]
        if self.has_bias:
            gate, up = gate + self.gate_bias[...], up + self.up_bias[...]
        out = (activation(self.act)(gate) * up) @ self.down[...]
        return out + self.down_bias[...] if self.has_bias else out
