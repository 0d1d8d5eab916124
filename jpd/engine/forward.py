"""The model over pages: one prefill chunk, one decode step, logits of a prompt for checking.

Pure functions of weights, pages and inputs, compiled by shape and made executables by
`jpd.engine.functions`. All go through the same decoder call; what is chosen of their logits is
choose.py's.
"""

import jax
import jax.numpy as jnp

from jpd.engine.decode_state import DecodeState
from jpd.engine.logprobs import LogprobArrays, prompt_logprobs
from jpd.engine.prefill_chunk import ChunkEnds, PrefillChunk
from jpd.nn.decoder import Decoder, PagedBatch
from jpd.nn.params import DecoderDef, GroupDef, rebuild, rebuild_group

Leaves = tuple[jax.Array, ...]
Layers = tuple[jax.Array, ...]


def forward_chunk(
    definition: DecoderDef, leaves: Leaves, layers: Layers, chunk: PrefillChunk, ends: ChunkEnds
) -> tuple[Layers, jax.Array, jax.Array]:
    """Write the chunk's KV.

    Returns the pages, hidden states [R, T, D], and float32 logits [R, V] after the last token of
    each row; zeros where no row ends its prompt.
    """
    decoder = rebuild(definition, leaves)
    hidden, layers = _run_chunk(decoder, layers, chunk, ends)
    return layers, hidden, _last_logits(decoder, hidden, chunk.num_valid, ends.is_last)


def embed_chunk(definition: DecoderDef, leaves: Leaves, tokens: jax.Array) -> jax.Array:
    """Of `forward_chunk` what stands before the layers: hidden states [R, T, D]."""
    return rebuild(definition, leaves).embedded(tokens)


def forward_group(
    definition: GroupDef,
    leaves: Leaves,
    layers: Layers,
    hidden: jax.Array,
    chunk: PrefillChunk,
    last_position: jax.Array,
) -> tuple[Layers, jax.Array]:
    """Of `forward_chunk` the layers of one group, with their own weights and pages."""
    positions, batch = _placed(chunk, last_position)
    hidden, layers = rebuild_group(definition, leaves)(hidden, positions, layers, batch)
    return layers, hidden


def finish_chunk(
    definition: DecoderDef,
    leaves: Leaves,
    hidden: jax.Array,
    num_valid: jax.Array,
    is_last: jax.Array,
) -> jax.Array:
    """Of `forward_chunk` what stands behind the layers: float32 logits [R, V]."""
    return _last_logits(rebuild(definition, leaves), hidden, num_valid, is_last)


def _last_logits(
    decoder: Decoder, hidden: jax.Array, num_valid: jax.Array, is_last: jax.Array
) -> jax.Array:
    """One prompt ends in a chunk as a rule, and its row alone is multiplied then."""
    shape = (hidden.shape[0], decoder.config.vocab_size)
    places = jnp.maximum(num_valid - 1, 0)[:, None, None]
    ends = jnp.take_along_axis(hidden, places, axis=1)[:, 0]

    def of_nobody() -> jax.Array:
        return jnp.zeros(shape, jnp.float32)

    def of_one() -> jax.Array:
        row = jnp.argmax(is_last)
        logits = decoder.logits(jax.lax.dynamic_slice_in_dim(ends, row, 1))
        return jax.lax.dynamic_update_slice_in_dim(of_nobody(), logits, row, 0)

    def of_all() -> jax.Array:
        return decoder.logits(ends)

    logits: jax.Array = jax.lax.switch(jnp.sum(is_last), (of_nobody, of_one, of_all))
    return logits


def chunk_logprobs(
    definition: DecoderDef,
    leaves: Leaves,
    hidden: jax.Array,
    tokens: jax.Array,
    num_valid: jax.Array,
    next_token: jax.Array,
) -> LogprobArrays:
    """Of the prompt's tokens [R, T] that follow each of a chunk's."""
    decoder = rebuild(definition, leaves)
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    is_end = offsets == num_valid[:, None] - 1
    next_tokens = jnp.where(is_end, next_token[:, None], jnp.roll(tokens, -1, axis=1))
    return prompt_logprobs(decoder.logits, hidden, next_tokens, decoder.config.vocab_size)


def chunk_logits(
    definition: DecoderDef, leaves: Leaves, layers: Layers, chunk: PrefillChunk, ends: ChunkEnds
) -> tuple[Layers, jax.Array]:
    """Write the chunk's KV. Returns the pages and float32 logits [R, T, V]."""
    decoder = rebuild(definition, leaves)
    hidden, layers = _run_chunk(decoder, layers, chunk, ends)
    return layers, decoder.logits(hidden)


def _run_chunk(
    decoder: Decoder, layers: Layers, chunk: PrefillChunk, ends: ChunkEnds
) -> tuple[jax.Array, Layers]:
    positions, batch = _placed(chunk, ends.last_position)
    return decoder(chunk.tokens, positions, layers, batch)


def _placed(chunk: PrefillChunk, last_position: jax.Array) -> tuple[jax.Array, PagedBatch]:
    """Positions [R, T] of a chunk's tokens, and where they stand."""
    offsets = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None]
    batch = PagedBatch(
        page_table=chunk.page_table,
        kv_lengths=chunk.start + chunk.num_valid,
        valid=offsets < chunk.num_valid[:, None],
        rope_lengths=last_position + 1,
    )
    return chunk.start[:, None] + offsets, batch


def forward_rows(
    decoder: Decoder, width: int, layers: Layers, state: DecodeState, paused: jax.Array
) -> tuple[Layers, jax.Array]:
    """Write the KV of each row's latest token, where it is active and not paused [R].

    The tables of `width` pages hold it. Returns the pages and float32 logits [R, V].
    """
    num_rows = paused.shape[0]
    takes_part = state.active[:num_rows] & ~paused
    positions = jnp.where(takes_part, state.positions[:num_rows], 0)
    batch = PagedBatch(
        page_table=state.page_table[:num_rows, :width],
        kv_lengths=jnp.where(takes_part, positions + 1, 0),
        valid=takes_part[:, None],
        rope_lengths=state.last_position[:num_rows] + 1,
    )
    tokens = state.tokens[:num_rows, None]
    hidden, layers = decoder(tokens, positions[:, None], layers, batch)
    return layers, decoder.logits(hidden[:, 0])


def forward_step(
    definition: DecoderDef,
    width: int,
    leaves: Leaves,
    layers: Layers,
    state: DecodeState,
    paused: jax.Array,
) -> tuple[Layers, jax.Array]:
    """`forward_rows` as an executable of its own."""
    return forward_rows(rebuild(definition, leaves), width, layers, state, paused)
