"""Log-probabilities of tokens from the model's raw logits, before bias, penalties and temperature.

Arrays have a fixed width of MAX_TOP_LOGPROBS alternatives; nothing is computed unless a row asks,
and the host copies nothing unless one did. Called by the engines and their step functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpd.request import LEAST_LOGPROB, MAX_TOP_LOGPROBS, TokenLogprobs

BLOCK_FLOATS = 1 << 24
"""At most about so many logits of a prompt are there at a time: 64 MiB."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Of one token in each place, [rows] or [rows, tokens]; zeros where nobody asked.

    Two arrays, because each costs the host microseconds in every call.
    """

    values: jax.Array  # float32 [..., 1 + MAX_TOP_LOGPROBS]: of the token, then of the best
    ids: jax.Array  # int32 [..., 1 + MAX_TOP_LOGPROBS]: the token's rank, then the best tokens

    @property
    def chosen(self) -> jax.Array:
        """float32 [...]"""
        return self.values[..., 0]

    @property
    def ranks(self) -> jax.Array:
        """int32 [...]; 1: the best"""
        return self.ids[..., 0]

    @property
    def top(self) -> jax.Array:
        """float32 [..., MAX_TOP_LOGPROBS], best first"""
        return self.values[..., 1:]

    @property
    def top_ids(self) -> jax.Array:
        """int32 [..., MAX_TOP_LOGPROBS]"""
        return self.ids[..., 1:]


def no_logprobs(*places: int) -> LogprobArrays:
    """Zeros of this shape."""
    shape = (*places, 1 + MAX_TOP_LOGPROBS)
    return LogprobArrays(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, is_wanted: jax.Array | bool = True
) -> LogprobArrays:
    """Of tokens [N] under logits [N, V]; computed for all rows if any is_wanted [N]."""
    found: LogprobArrays = jax.lax.cond(
        jnp.any(is_wanted),
        lambda: _token_logprobs(logits, tokens),
        lambda: no_logprobs(tokens.shape[0]),
    )
    return found


def _token_logprobs(logits: jax.Array, tokens: jax.Array) -> LogprobArrays:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    norms = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    num_better = jnp.sum((logits > chosen).astype(jnp.int32), axis=1)
    num_best = min(MAX_TOP_LOGPROBS, logits.shape[1])
    best, best_ids = jax.lax.top_k(logits, num_best)
    padding = ((0, 0), (0, MAX_TOP_LOGPROBS - num_best))
    values = jnp.concatenate([chosen - norms, best - norms], axis=1)
    ids = jnp.concatenate([num_better[:, None] + 1, best_ids.astype(jnp.int32)], axis=1)
    return LogprobArrays(jnp.pad(values, padding, constant_values=-jnp.inf), jnp.pad(ids, padding))


def prompt_logprobs(
    to_logits: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    next_tokens: jax.Array,
    vocab_size: int,
) -> LogprobArrays:
    """Of the tokens [R, T] that follow hidden states [R, T, D], in blocks of tokens.

    So no logits of the whole chunk exist: at most BLOCK_FLOATS, or those of one token.
    """
    num_tokens = next_tokens.size
    block = min(num_tokens, max(1, BLOCK_FLOATS // vocab_size))
    num_blocks = -(-num_tokens // block)
    padding = num_blocks * block - num_tokens

    def of_block(part: tuple[jax.Array, jax.Array]) -> LogprobArrays:
        return _token_logprobs(to_logits(part[0]), part[1])

    blocks = (
        jnp.pad(hidden.reshape(num_tokens, -1), ((0, padding), (0, 0))),
        jnp.pad(next_tokens.reshape(num_tokens), (0, padding)),
    )
    found = jax.lax.map(
        of_block, jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), blocks)
    )

    def join(parts: jax.Array) -> jax.Array:
        flat = parts.reshape(num_blocks * block, *parts.shape[2:])[:num_tokens]
        return flat.reshape(*next_tokens.shape, *parts.shape[2:])

    joined: LogprobArrays = jax.tree.map(join, found)
    return joined


def read_logprobs(arrays: LogprobArrays, places: slice, num_top: int) -> tuple[TokenLogprobs, ...]:
    """Those at some places of one row, each with its num_top best; of arrays on the host."""
    chosen, ranks, top_ids, top = (
        np.asarray(array)[places]
        for array in (arrays.chosen, arrays.ranks, arrays.top_ids, arrays.top)
    )
    rows = zip(
        _finite(chosen).tolist(),
        ranks.tolist(),
        top_ids[:, :num_top].tolist(),
        _finite(top[:, :num_top]).tolist(),
        strict=True,
    )
    return tuple(
        TokenLogprobs(logprob, rank, tuple(ids), tuple(values))
        for logprob, rank, ids, values in rows
    )


def _finite(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Nothing below LEAST_LOGPROB, NaN included."""
    return np.where(values > LEAST_LOGPROB, values, LEAST_LOGPROB)
