"""A golden model on a worker's mesh: leaves, pages and outputs in the shardings of a server."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jpd.nn.decoder import PagedBatch
from jpd.nn.params import rebuild
from jpd.parallel.mesh import make_worker_mesh
from jpd.parallel.sharding import sharding_for
from tests.nn.golden import PAGE_SIZE, GoldenModel

Call = tuple[jax.Array, jax.Array, tuple[jax.Array, ...], PagedBatch]


class ShardedModel:
    """One compiled forward pass over `mesh`, for prompts of a fixed shape."""

    def __init__(self, model: GoldenModel, *, tensor: int, expert: int = 1) -> None:
        self.model = model
        devices = jax.devices()[: tensor * expert]
        self.mesh: Mesh = make_worker_mesh(
            devices, tensor=tensor, expert=expert, num_cached_heads=model.config.num_cached_heads
        )
        specs = model.abstract.specs
        params = tuple(sharding_for(self.mesh, spec.axes, spec.shape) for spec in specs)
        self.leaves = jax.device_put(model.leaves, params)
        whole = NamedSharding(self.mesh, PartitionSpec())
        axes = ("pages", "page", "kv_heads", None)
        pages = sharding_for(self.mesh, axes, model.empty_kv(1)[0].shape)
        kv = (pages,) * model.config.num_layers
        graphdef = model.abstract.graphdef

        @partial(
            jax.jit,
            in_shardings=(params, whole, whole, kv, whole),
            out_shardings=(whole, kv),
            donate_argnums=3,
        )
        def forward(
            leaves: tuple[jax.Array, ...],
            tokens: jax.Array,
            positions: jax.Array,
            kv: tuple[jax.Array, ...],
            batch: PagedBatch,
        ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            decoder = rebuild(graphdef, leaves)
            hidden, kv = decoder(tokens, positions, kv, batch)
            return decoder.logits(hidden), kv

        self.forward, self.whole, self.kv_shardings = forward, whole, kv

    def call(self, tokens: np.ndarray) -> Call:
        """Arguments of a pass over whole prompts, each row with pages of its own."""
        rows, length = tokens.shape
        page_table = 1 + np.arange(rows * -(-length // PAGE_SIZE)).reshape(rows, -1)
        positions = np.broadcast_to(np.arange(length), tokens.shape).copy()
        batch = PagedBatch(
            jnp.asarray(page_table, jnp.int32),
            jnp.full((rows,), length, jnp.int32),
            jnp.ones(tokens.shape, bool),
        )
        kv = self.model.empty_kv(1 + page_table.size)
        inputs = (jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32))
        tokens_there, positions_there = jax.device_put(inputs, self.whole)
        return (
            tokens_there,
            positions_there,
            jax.device_put(kv, self.kv_shardings),
            jax.device_put(batch, self.whole),
        )

    def whole_pass(self, tokens: np.ndarray) -> np.ndarray:
        """Logits [B, T, V] of prompts in one pass."""
        return np.asarray(self.forward(self.leaves, *self.call(tokens))[0])

    def compiled_text(self, tokens: np.ndarray) -> str:
        text: str = self.forward.lower(self.leaves, *self.call(tokens)).compile().as_text()
        return text
