"""Drafts by prompt lookup against a search in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.engine.speculation import num_accepted, prompt_lookup


def expected_drafts(tokens: list[int], limit: int, num_drafts: int) -> list[int]:
    """Of the sequence `tokens`, whose last one is the latest."""
    for length in (3, 2):
        pattern = tokens[-length:]
        if len(pattern) < length:
            continue
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == pattern:
                following = tokens[start + length :]
                repeated = following * num_drafts
                return repeated[: min(limit, num_drafts)]
    return []


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_lookup_equals_a_plain_search(num_drafts: int) -> None:
    rng = np.random.default_rng(num_drafts)
    lengths = [1, 2, 3, 4, 5, 9, 17, 40, 40, 63, 64, 64]
    history = rng.integers(0, 3, (len(lengths), 64)).astype(np.int32)
    history[-1] = np.tile([5, 6, 7, 8], 16)
    limits = rng.integers(0, 6, len(lengths)).astype(np.int32)
    limits[-1] = 4
    positions = np.array(lengths, np.int32) - 1
    drafts, counts = jax.jit(prompt_lookup, static_argnums=3)(
        history, positions, limits, num_drafts
    )
    for row, length in enumerate(lengths):
        expected = expected_drafts(history[row, :length].tolist(), limits[row], num_drafts)
        assert np.asarray(drafts)[row, : counts[row]].tolist() == expected, row
    assert np.asarray(drafts)[-1].tolist() == [5, 6, 7, 8][:num_drafts]
    assert int(counts[-1]) == num_drafts


def test_a_run_at_the_end_is_taken_to_repeat() -> None:
    history = jnp.asarray([[1, 2, 9, 9, 9, 9, 0, 0]], jnp.int32)
    drafts, counts = jax.jit(prompt_lookup, static_argnums=3)(
        history, jnp.asarray([5]), jnp.asarray([3]), 3
    )
    assert drafts.tolist() == [[9, 9, 9]] and counts.tolist() == [3]


def test_drafts_are_kept_up_to_the_first_wrong_one() -> None:
    tokens = jnp.asarray([[1, 2, 3, 4], [1, 9, 3, 4], [1, 2, 3, 4], [8, 2, 3, 4]])
    drafts = jnp.asarray([[1, 2, 3]] * 4)
    found = jax.jit(num_accepted)(tokens, drafts, jnp.asarray([3, 3, 2, 3]))
    assert found.tolist() == [3, 1, 2, 0]
