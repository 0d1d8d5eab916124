"""Bits of a mask and the logits they leave."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpd.engine.token_masks import make_masks, masked, open_masks


@pytest.mark.parametrize("vocab_size", [32, 70, 160])
def test_only_allowed_tokens_keep_their_logits(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = jnp.asarray(rng.standard_normal((3, vocab_size), np.float32))
    allowed = rng.integers(0, 2, vocab_size).astype(bool)
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token_id in np.flatnonzero(allowed):
        words[token_id // 32] |= np.uint32(1 << (token_id % 32))
    found = np.asarray(masked(logits, make_masks(3, vocab_size, {1: words})))
    assert np.array_equal(found[[0, 2]], logits[np.array([0, 2])])
    assert np.array_equal(found[1], np.where(allowed, logits[1], -np.inf))
    assert np.array_equal(masked(logits, open_masks(3, vocab_size)), logits)
