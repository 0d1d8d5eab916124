"""What runs on the devices: one prefill chunk, one decode step, logits for checking.

Pure functions of weights, pages and inputs, made executables by `jpd.engine.functions`. Both steps
go through the same decoder call and the same sampling.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jpd.cache.page_allocator import BIN_PAGE
from jpd.engine.buckets import ShapeBuckets
from jpd.engine.decode_state import DecodeState, advance, first_rows, with_first_rows
from jpd.engine.sampling import SamplingRows, greedy_rows, on_host, sample
from jpd.nn.decoder import Decoder, PagedBatch
from jpd.nn.params import DecoderDef, rebuild

Leaves = tuple[jax.Array, ...]
Layers = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """One chunk of one prompt, padded to T tokens and W pages."""

    tokens: jax.Array  # int32 [1, T]
    start: jax.Array  # int32 [1]: position of the first token
    num_valid: jax.Array  # int32 [1]
    page_table: jax.Array  # int32 [1, W]
    sampling: SamplingRows  # of one row
    is_last: jax.Array  # bool []: a token is sampled after it


def empty_chunk(num_tokens: int, width: int) -> PrefillChunk:
    """A chunk of this shape without a valid token, on the host."""
    return PrefillChunk(
        tokens=on_host(np.zeros((1, num_tokens), np.int32)),
        start=on_host(np.zeros(1, np.int32)),
        num_valid=on_host(np.zeros(1, np.int32)),
        page_table=on_host(np.full((1, width), BIN_PAGE, np.int32)),
        sampling=greedy_rows(1),
        is_last=on_host(np.array(True, np.bool_)),
    )


def make_chunk(
    buckets: ShapeBuckets,
    token_ids: Sequence[int],
    start: int,
    page_ids: Sequence[int],
    sampling: SamplingRows,
    *,
    is_last: bool,
) -> PrefillChunk:
    """The chunk of token_ids from position `start` on, on the host; page_ids are the sequence's."""
    num_valid = len(token_ids)
    tokens = np.zeros((1, buckets.prefill_length(num_valid)), np.int32)
    tokens[0, :num_valid] = token_ids
    page_table = np.full((1, buckets.context_width(start + num_valid)), BIN_PAGE, np.int32)
    used = page_ids[: page_table.shape[1]]
    page_table[0, : len(used)] = used
    return PrefillChunk(
        tokens=on_host(tokens),
        start=on_host(np.array([start], np.int32)),
        num_valid=on_host(np.array([num_valid], np.int32)),
        page_table=on_host(page_table),
        sampling=sampling,
        is_last=on_host(np.array(is_last, np.bool_)),
    )


def prefill_chunk(
    definition: DecoderDef, leaves: Leaves, layers: Layers, chunk: PrefillChunk
) -> tuple[Layers, jax.Array]:
    """Write the chunk's KV. Returns the pages and the token sampled after it (0 if not is_last)."""
    decoder = rebuild(definition, leaves)
    hidden, layers = _run_chunk(decoder, layers, chunk)

    def sample_next() -> jax.Array:
        last = jnp.take_along_axis(hidden, (chunk.num_valid - 1)[:, None, None], axis=1)[:, 0]
        position = chunk.start + chunk.num_valid
        return sample(decoder.logits(last), chunk.sampling, position)

    token = jax.lax.cond(chunk.is_last, sample_next, lambda: jnp.zeros(1, jnp.int32))
    return layers, token


def chunk_logits(
    definition: DecoderDef, leaves: Leaves, layers: Layers, chunk: PrefillChunk
) -> tuple[Layers, jax.Array]:
    """Write the chunk's KV. Returns the pages and float32 logits [T, V]."""
    decoder = rebuild(definition, leaves)
    hidden, layers = _run_chunk(decoder, layers, chunk)
    return layers, decoder.logits(hidden[0])


def _run_chunk(decoder: Decoder, layers: Layers, chunk: PrefillChunk) -> tuple[jax.Array, Layers]:
    offsets = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None]
    batch = PagedBatch(
        page_table=chunk.page_table,
        kv_lengths=chunk.start + chunk.num_valid,
        valid=offsets < chunk.num_valid[:, None],
    )
    return decoder(chunk.tokens, chunk.start[:, None] + offsets, layers, batch)


def decode_step(
    definition: DecoderDef,
    num_rows: int,
    width: int,
    leaves: Leaves,
    layers: Layers,
    whole: DecodeState,
) -> tuple[Layers, DecodeState, jax.Array]:
    """One token for every active slot of the first num_rows, in tables of `width` pages.

    Returns the pages, the state and the results int32 [2, num_rows]: tokens and outcomes.
    """
    decoder = rebuild(definition, leaves)
    state = first_rows(whole, num_rows)
    positions = jnp.where(state.active, state.positions, 0)
    batch = PagedBatch(
        page_table=state.page_table[:, :width],
        kv_lengths=jnp.where(state.active, positions + 1, 0),
        valid=state.active[:, None],
    )
    hidden, layers = decoder(state.tokens[:, None], positions[:, None], layers, batch)
    tokens = sample(decoder.logits(hidden[:, 0]), _running(state), positions + 1)
    state, results = advance(state, tokens)
    return layers, with_first_rows(whole, state), results


def _running(state: DecodeState) -> SamplingRows:
    """The settings, with idle slots as plain greedy rows that ask for no work."""
    return dataclasses.replace(
        state.sampling,
        temperature=jnp.where(state.active, state.sampling.temperature, 0.0),
        min_position=jnp.where(state.active, state.sampling.min_position, 0),
    )
