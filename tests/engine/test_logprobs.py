"""Log-probabilities against a float64 log_softmax, whole and in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.engine import logprobs as module
from jpd.engine.logprobs import prompt_logprobs, read_logprobs, token_logprobs
from jpd.parallel.mesh import make_worker_mesh
from jpd.parallel.sharding import sharding_for
from jpd.request import LEAST_LOGPROB, MAX_TOP_LOGPROBS


def exact(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_chosen_rank_and_alternatives() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 160)).astype(np.float32) * 4
    tokens = np.array([5, int(logits[1].argmax()), 159], np.int32)
    found = jax.jit(token_logprobs)(logits, tokens)
    expected = exact(logits)
    for row in range(3):
        order = np.argsort(-logits[row], kind="stable")
        np.testing.assert_allclose(found.chosen[row], expected[row, tokens[row]], atol=1e-5)
        assert int(found.ranks[row]) == 1 + order.tolist().index(tokens[row])
        assert found.top_ids[row].tolist() == order[:MAX_TOP_LOGPROBS].tolist()
        best = np.sort(expected[row])[::-1][:MAX_TOP_LOGPROBS]
        np.testing.assert_allclose(found.top[row], best, atol=1e-5)


def test_the_vocabulary_is_never_sorted() -> None:
    logits, tokens = np.zeros((2, 4096), np.float32), np.zeros(2, np.int32)
    assert " sort(" not in jax.jit(token_logprobs).lower(logits, tokens).compile().as_text()


@pytest.mark.parametrize("tensor", [2, 4])
def test_vocabulary_split_over_devices_gives_the_same(tensor: int) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 160)).astype(np.float32)
    tokens = np.arange(4, dtype=np.int32)
    mesh = make_worker_mesh(jax.devices()[:tensor], tensor=tensor, expert=1, num_cached_heads=2)
    sharding = sharding_for(mesh, ("batch", "vocab"), logits.shape)
    split = jax.jit(token_logprobs)(jax.device_put(logits, sharding), tokens)
    whole = jax.jit(token_logprobs)(logits, tokens)
    np.testing.assert_allclose(split.top, whole.top, atol=1e-6)
    assert split.top_ids.tolist() == whole.top_ids.tolist()
    assert split.ranks.tolist() == whole.ranks.tolist()


def test_nothing_is_computed_unless_a_row_wants_it() -> None:
    logits = np.ones((2, 160), np.float32)
    tokens = np.zeros(2, np.int32)
    found = jax.jit(token_logprobs)(logits, tokens, np.zeros(2, np.bool_))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found))
    found = jax.jit(token_logprobs)(logits, tokens, np.array([False, True]))
    assert np.asarray(found.chosen).all()


@pytest.mark.parametrize("block_floats", [1, 160 * 3, 160 * 8, 1 << 24])
def test_prompts_in_blocks_equal_the_whole(
    block_floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_FLOATS", block_floats)
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(2, 8, 12)).astype(np.float32)
    head = rng.normal(size=(12, 160)).astype(np.float32)
    tokens = rng.integers(0, 160, (2, 8)).astype(np.int32)
    found = jax.jit(lambda h, t: prompt_logprobs(lambda x: x @ head, h, t, 160))(hidden, tokens)
    expected = exact(hidden @ head)
    chosen = np.take_along_axis(expected, tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.chosen, chosen, atol=2e-5)
    np.testing.assert_allclose(found.top, -np.sort(-expected)[..., :MAX_TOP_LOGPROBS], atol=2e-5)


def test_no_logits_of_a_whole_chunk_exist() -> None:
    vocab = 1 << 18
    head = jnp.zeros((4, vocab), jnp.float32)

    def run(hidden: jax.Array, tokens: jax.Array, head: jax.Array) -> jax.Array:
        return prompt_logprobs(lambda x: x @ head, hidden, tokens, vocab).chosen

    hidden, tokens = np.zeros((1, 2048, 4), np.float32), np.zeros((1, 2048), np.int32)
    memory = jax.jit(run).lower(hidden, tokens, head).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 6 * 4 * module.BLOCK_FLOATS  # whole: 32 blocks and more


def test_e16_minus_infinity_and_a_small_vocabulary_are_finite_numbers() -> None:
    logits = np.array([[0.0, -np.inf, 1.0]], np.float32)
    found = token_logprobs(jnp.asarray(logits), jnp.array([1], jnp.int32))
    [entry] = read_logprobs(jax.tree.map(np.asarray, found), slice(1), 3)
    assert entry.logprob == LEAST_LOGPROB and entry.rank == 3
    assert entry.top_token_ids == (2, 0, 1) and entry.top_logprobs[2] == LEAST_LOGPROB
