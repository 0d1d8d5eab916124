"""Decode calls that take several tokens of a row: steps one after another, or drafts verified.

Pure functions of weights, pages and the decode state, made executables by `jpd.engine.functions`.
Their parts are those of a single step: the model of forward.py, the choice of choose.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jpd.engine.buckets import DecodeShape
from jpd.engine.choose import advance_rows
from jpd.engine.decode_state import DecodeState, advance_several, first_rows, with_first_rows
from jpd.engine.forward import Layers, Leaves, forward_rows
from jpd.engine.logprobs import LogprobArrays, token_logprobs
from jpd.engine.results import StepResults, joined_results
from jpd.engine.sampling import sample
from jpd.engine.sampling_rows import SamplingRows
from jpd.engine.speculation import num_accepted, prompt_lookup
from jpd.engine.token_masks import TokenMasks, masked
from jpd.nn.decoder import PagedBatch
from jpd.nn.params import DecoderDef, rebuild


def several_steps(
    definition: DecoderDef,
    shape: DecodeShape,
    leaves: Leaves,
    layers: Layers,
    whole: DecodeState,
    masks: TokenMasks,
) -> tuple[Layers, DecodeState, StepResults]:
    """Tokens for every active slot of the first rows, one after another.

    The tables of `shape.width` pages hold all of them.
    """
    decoder = rebuild(definition, leaves)

    def step(carry: tuple[Layers, DecodeState], _: None) -> tuple[Any, StepResults]:
        layers, state = carry
        layers, logits = forward_rows(decoder, shape.width, layers, state, masks.paused)
        state, results = advance_rows(state, logits, masks)
        return (layers, state), results

    carry = layers, first_rows(whole, shape.num_rows)
    (layers, state), steps = jax.lax.scan(step, carry, length=shape.num_steps)
    return layers, with_first_rows(whole, state), joined_results(steps)


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
