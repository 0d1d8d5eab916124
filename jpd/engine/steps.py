"""What runs on the devices: one prefill chunk, one decode step, logits for checking.

Pure functions of weights, pages and inputs, made executables by `jpd.engine.functions`. Both steps
go through the same decoder call and the same sampling.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jpd.engine.buckets import DecodeShape
from jpd.engine.decode_state import (
    DecodeState,
    advance,
    advance_several,
    first_rows,
    with_first_rows,
)
from jpd.engine.logprobs import LogprobArrays, no_logprobs, prompt_logprobs, token_logprobs
from jpd.engine.prefill_chunk import PrefillChunk
from jpd.engine.results import StepResults, joined_results, one_token_results, outcomes_of
from jpd.engine.sampling import sample
from jpd.engine.sampling_rows import SamplingRows
from jpd.engine.speculation import num_accepted, prompt_lookup
from jpd.engine.token_masks import TokenMasks, masked
from jpd.nn.decoder import Decoder, PagedBatch
from jpd.nn.params import DecoderDef, rebuild

Leaves = tuple[jax.Array, ...]
Layers = tuple[jax.Array, ...]


def prefill_chunk(
    definition: DecoderDef,
    leaves: Leaves,
    layers: Layers,
    chunk: PrefillChunk,
    masks: TokenMasks,
) -> tuple[Layers, StepResults, LogprobArrays]:
    """Write the chunk's KV.

    Returns the pages, a token for each row that ends its prompt, and the log-probabilities [R, T]
    of the prompt's tokens that follow each of the chunk's, if a row wants them.
    """
    decoder = rebuild(definition, leaves)
    hidden, layers = _run_chunk(decoder, layers, chunk)
    positions = chunk.start + chunk.num_valid

    def sample_next() -> tuple[jax.Array, LogprobArrays]:
        ends = jnp.maximum(chunk.num_valid - 1, 0)[:, None, None]
        last = jnp.take_along_axis(hidden, ends, axis=1)[:, 0]
        logits, rows = decoder.logits(last), chunk.sampling.only(chunk.is_last)
        tokens = sample(masked(logits, masks), rows, positions, lambda: chunk.history)
        return tokens, token_logprobs(logits, tokens, rows.wants_logprobs)

    tokens, logprobs = jax.lax.cond(
        jnp.any(chunk.is_last),
        sample_next,
        lambda: (jnp.zeros_like(chunk.num_valid), no_logprobs(*chunk.num_valid.shape)),
    )
    outcomes = outcomes_of(tokens, positions, chunk.sampling, chunk.last_position, chunk.is_last)
    of_prompt = _prompt_logprobs(decoder, hidden, chunk)
    return layers, one_token_results(tokens, outcomes, logprobs), of_prompt


def _prompt_logprobs(decoder: Decoder, hidden: jax.Array, chunk: PrefillChunk) -> LogprobArrays:
    offsets = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None]
    following = jnp.roll(chunk.tokens, -1, axis=1)
    is_end = offsets == chunk.num_valid[:, None] - 1
    next_tokens = jnp.where(is_end, chunk.next_token[:, None], following)
    found: LogprobArrays = jax.lax.cond(
        jnp.any(chunk.wants_prompt_logprobs),
        lambda: prompt_logprobs(decoder.logits, hidden, next_tokens, decoder.config.vocab_size),
        lambda: no_logprobs(*next_tokens.shape),
    )
    return found


def chunk_logits(
    definition: DecoderDef, leaves: Leaves, layers: Layers, chunk: PrefillChunk
) -> tuple[Layers, jax.Array]:
    """Write the chunk's KV. Returns the pages and float32 logits [R, T, V]."""
    decoder = rebuild(definition, leaves)
    hidden, layers = _run_chunk(decoder, layers, chunk)
    return layers, decoder.logits(hidden)


def _run_chunk(decoder: Decoder, layers: Layers, chunk: PrefillChunk) -> tuple[jax.Array, Layers]:
    offsets = jnp.arange(chunk.tokens.shape[1], dtype=jnp.int32)[None]
    batch = PagedBatch(
        page_table=chunk.page_table,
        kv_lengths=chunk.start + chunk.num_valid,
        valid=offsets < chunk.num_valid[:, None],
        rope_lengths=chunk.last_position + 1,
    )
    return decoder(chunk.tokens, chunk.start[:, None] + offsets, layers, batch)


def decode_step(
    definition: DecoderDef,
    shape: DecodeShape,
    leaves: Leaves,
    layers: Layers,
    whole: DecodeState,
    masks: TokenMasks,
) -> tuple[Layers, DecodeState, StepResults]:
    """A token for every active slot of the first rows, or one after another of several steps.

    The tables of `shape.width` pages hold all of these tokens.
    """
    decoder = rebuild(definition, leaves)

    def step(carry: tuple[Layers, DecodeState], _: None) -> tuple[Any, StepResults]:
        layers, state, results = _decode_one(decoder, shape.width, masks, *carry)
        return (layers, state), results

    carry = layers, first_rows(whole, shape.num_rows)
    if shape.num_steps == 1:
        (layers, state), results = step(carry, None)
    else:
        (layers, state), steps = jax.lax.scan(step, carry, length=shape.num_steps)
        results = joined_results(steps)
    return layers, with_first_rows(whole, state), results


def _decode_one(
    decoder: Decoder, width: int, masks: TokenMasks, layers: Layers, state: DecodeState
) -> tuple[Layers, DecodeState, StepResults]:
    takes_part = state.active & ~masks.paused
    positions = jnp.where(takes_part, state.positions, 0)
    batch = PagedBatch(
        page_table=state.page_table[:, :width],
        kv_lengths=jnp.where(takes_part, positions + 1, 0),
        valid=takes_part[:, None],
        rope_lengths=state.last_position + 1,
    )
    hidden, layers = decoder(state.tokens[:, None], positions[:, None], layers, batch)
    logits, rows = decoder.logits(hidden[:, 0]), state.sampling.only(takes_part)
    num_rows, num_seen = logits.shape[0], width * layers[0].shape[1]  # none reaches beyond
    history = functools.partial(jax.lax.slice, state.history, (0, 0), (num_rows, num_seen))
    tokens = sample(masked(logits, masks), rows, positions + 1, history)
    logprobs = token_logprobs(logits, tokens, rows.wants_logprobs)
    state, results = advance(state, tokens, logprobs, takes_part)
    return layers, state, results


def verify_step(
    definition: DecoderDef,
    shape: DecodeShape,
    leaves: Leaves,
    layers: Layers,
    whole: DecodeState,
    masks: TokenMasks,
) -> tuple[Layers, DecodeState, StepResults]:
    """Up to 1 + shape.num_drafts tokens for every active slot of the first rows.

    A slot's latest token and its drafts are computed like a chunk of a prompt. What is written to
    the pages for a draft that was wrong is overwritten when its position comes.
    """
    decoder = rebuild(definition, leaves)
    state = first_rows(whole, shape.num_rows)
    takes_part = state.active & ~masks.paused
    start = jnp.where(takes_part, state.positions, 0)
    num_seen = shape.width * layers[0].shape[1]
    history = jax.lax.slice(state.history, (0, 0), (shape.num_rows, num_seen))
    limits = jnp.minimum(state.max_drafts, state.last_position - start - 1)
    drafts, num_drafts = prompt_lookup(
        history, start, jnp.where(takes_part, limits, 0), shape.num_drafts
    )
    offsets = jnp.arange(1 + shape.num_drafts, dtype=jnp.int32)[None]
    valid = takes_part[:, None] & (offsets <= num_drafts[:, None])
    batch = PagedBatch(
        page_table=state.page_table[:, : shape.width],
        kv_lengths=jnp.where(takes_part, start + 1 + num_drafts, 0),
        valid=valid,
        rope_lengths=state.last_position + 1,
    )
    inputs = jnp.concatenate([state.tokens[:, None], drafts], axis=1)
    hidden, layers = decoder(inputs, start[:, None] + offsets, layers, batch)
    positions = start[:, None] + 1 + offsets
    logits = decoder.logits(hidden)
    tokens, logprobs = _sample_each(logits, state.sampling, valid, positions, history, masks)
    num_tokens = 1 + num_accepted(tokens, drafts, num_drafts)
    state, results = advance_several(state, tokens, num_tokens, logprobs, takes_part)
    results = dataclasses.replace(results, num_drafts=num_drafts)
    return layers, with_first_rows(whole, state), results


def _sample_each(
    logits: jax.Array,
    sampling: SamplingRows,
    valid: jax.Array,
    positions: jax.Array,
    history: jax.Array,
    masks: TokenMasks,
) -> tuple[jax.Array, LogprobArrays]:
    """Tokens and logprobs [B, T] of logits [B, T, V] where they are valid, each with its own key.

    Masks and penalties are right for the first of each row; a row that has them has no other.
    """
    shape = valid.shape

    def repeated(array: jax.Array) -> jax.Array:
        return jnp.repeat(array, shape[1], axis=0)

    rows: SamplingRows = jax.tree.map(repeated, sampling).only(valid.reshape(-1))
    flat = logits.reshape(-1, logits.shape[-1])
    allowed: jax.Array = jax.lax.cond(
        masks.is_used,
        lambda: logits.at[:, 0].set(masked(logits[:, 0], masks)).reshape(flat.shape),
        lambda: flat,
    )
    tokens = sample(allowed, rows, positions.reshape(-1), lambda: repeated(history))
    logprobs = token_logprobs(flat, tokens, rows.wants_logprobs)
    by_row: LogprobArrays = jax.tree.map(
        lambda array: array.reshape(*shape, *array.shape[1:]), logprobs
    )
    return tokens.reshape(shape), by_row
