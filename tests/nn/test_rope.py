"""Tables of cos and sin are computed once per call, however many layers turn by them."""

import jax
import jax.numpy as jnp

from jpd.nn.config import RopeConfig
from jpd.nn.rope import apply_rope, rope_tables

HEAD = 16
LAYERS, HEADS = 3, 5


def test_the_compiler_leaves_one_table_for_all_layers() -> None:
    """Left alone it computes cos and sin for every element of every layer's queries and keys."""

    def layers(x: jax.Array, positions: jax.Array, lengths: jax.Array) -> jax.Array:
        rope = RopeConfig(theta=10_000.0)
        tables = rope_tables(rope, HEAD, positions, lengths)
        for _ in range(LAYERS):
            flat = x.reshape(*x.shape[:2], -1)
            x = apply_rope((flat @ flat.mT @ flat).reshape(x.shape), tables, rope)
        return x

    x = jnp.ones((1, 64, HEADS, HEAD))
    positions, lengths = jnp.arange(64, dtype=jnp.int32)[None], jnp.full(1, 64, jnp.int32)
    compiled = jax.jit(layers).lower(x, positions, lengths).compile().as_text()
    assert compiled is not None
    assert [compiled.count(f" {name}(") for name in ("cosine", "sine")] == [1, 1]
