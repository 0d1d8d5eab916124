"""Sampling against exact distributions, and what a row's token may depend on."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.engine import sampling as sampling_module
from jpd.engine.sampling import (
    _bisected_thresholds,
    _candidate_thresholds,
    _draw,
    best_tokens,
    sample,
)
from jpd.engine.sampling_rows import SamplingRows, greedy_rows, sampling_row
from jpd.parallel.mesh import make_worker_mesh
from jpd.parallel.sharding import sharding_for
from jpd.request import SamplingParams


@jax.jit
def jit_sample(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """Without penalties there is no look at the history."""
    history = jnp.zeros((logits.shape[0], 1), jnp.int32)
    return sample(logits, rows, positions, lambda: history)


def stack(rows: Sequence[SamplingRows]) -> SamplingRows:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)


def rows_of(*settings: dict[str, Any], stop_ids: Sequence[int] = ()) -> SamplingRows:
    return stack([sampling_row(SamplingParams(**one), stop_ids, 0) for one in settings])


def exact_probabilities(logits: np.ndarray, **settings: Any) -> np.ndarray:
    """The distribution by definition: sort everything, in float64."""
    scaled = logits.astype(np.float64) / settings.get("temperature", 1.0)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    top_k = settings.get("top_k", 0) or len(probs)
    probs[order[top_k:]] = 0
    probs /= probs.sum()
    if settings.get("top_p", 1.0) < 1:
        num_kept = int(np.searchsorted(np.cumsum(probs[order]), settings["top_p"] - 1e-12)) + 1
        probs[order[num_kept:]] = 0
    probs[probs < settings.get("min_p", 0.0) * probs.max()] = 0
    return probs / probs.sum()


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_drawn_tokens_follow_the_exact_distribution(settings: dict[str, Any]) -> None:
    num_draws = 20_000
    logits = np.random.default_rng(1).normal(size=40).astype(np.float32) * 2
    row = sampling_row(SamplingParams(seed=3, **settings), (), 0)
    rows = jax.tree.map(lambda leaf: np.repeat(leaf, num_draws, axis=0), row)
    positions = np.arange(num_draws, dtype=np.int32)
    tokens = np.asarray(jit_sample(np.tile(logits, (num_draws, 1)), rows, positions))
    expected = exact_probabilities(logits, **settings) * num_draws
    counts = np.bincount(tokens, minlength=40)
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    likely = expected >= 5
    chi_square = (((counts - expected) ** 2)[likely] / expected[likely]).sum()
    degrees = likely.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 3


def test_greedy_is_the_arg_max_and_of_equals_the_lowest_id() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 160)).astype(np.float32)
    logits[2, [7, 9]] = 50.0
    logits[3, [150, 151]] = 50.0
    logits[4, [0, 159]] = 50.0
    assert best_tokens(jnp.asarray(logits)).tolist() == logits.argmax(-1).tolist()
    tokens = jit_sample(logits, greedy_rows(5), np.zeros(5, np.int32))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_greedy_rows_stay_greedy_beside_sampled_ones() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 160)).astype(np.float32)
    rows = rows_of({"temperature": 0.0}, {"temperature": 2.0, "seed": 1}, {"temperature": 0.0})
    tokens = np.asarray(jit_sample(logits, rows, np.zeros(3, np.int32)))
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].argmax()


def test_a_seeded_row_does_not_depend_on_its_batch_mates_or_its_slot() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 160)).astype(np.float32)
    mine = {"temperature": 1.5, "top_p": 0.9, "seed": -12345678901234}
    others = [{"temperature": 1.0, "top_k": k, "seed": k} for k in (1, 2, 3)]
    positions = np.array([0, 5, 17], np.int32)
    for position in positions:
        spots = []
        for slot in range(4):
            settings = [*others[:slot], mine, *others[slot:]]
            batch = rng.normal(size=(4, 160)).astype(np.float32)
            batch[slot] = logits[0]
            at = np.full(4, position, np.int32)
            spots.append(int(np.asarray(jit_sample(batch, rows_of(*settings), at))[slot]))
        assert len(set(spots)) == 1


def test_seed_and_position_both_change_the_draw() -> None:
    logits = np.zeros((1, 160), np.float32)
    draws = {
        (seed, position): int(
            jit_sample(logits, rows_of({"seed": seed}), np.array([position], np.int32))[0]
        )
        for seed in (1, 2, 1 + (1 << 40))
        for position in (3, 4)
    }
    assert len(set(draws.values())) == 6


def test_e05_stop_ids_cannot_be_chosen_before_min_tokens() -> None:
    logits = np.zeros((1, 160), np.float32)
    logits[0, [2, 9]] = [30.0, 20.0]
    logits[0, 11] = 10.0
    for temperature in (0.0, 1.0):
        settings = SamplingParams(temperature=temperature, min_tokens=4, seed=1)
        row = sampling_row(settings, (2, 9), first_position=10)
        chosen = [
            int(jit_sample(logits, row, np.array([position], np.int32))[0])
            for position in (10, 13, 14)
        ]
        assert chosen == [11, 11, 2], "tokens 1 to 4 may not be a stop id, the fifth may"


def test_thresholds_by_candidates_and_by_bisection_are_the_exact_ones() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(64, 1000)).astype(np.float32) * rng.uniform(0.1, 6, size=(64, 1))
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    settings = [
        {
            "top_k": int(rng.choice([0, 1, 3, 40, 200, 999, 5000])),
            "top_p": float(rng.choice([0.1, 0.5, 0.9, 0.999, 1.0])),
        }
        for _ in range(64)
    ]
    rows = rows_of(*settings)
    bisected = np.asarray(jax.jit(_bisected_thresholds)(weights, rows))
    by_candidates = functools.partial(_candidate_thresholds, num_candidates=128)
    candidates, is_exact = (np.asarray(x) for x in jax.jit(by_candidates)(weights, rows))
    for row in range(64):
        kept = exact_probabilities(logits[row], **settings[row]) > 0
        wanted = int(kept.sum())
        # Where the mass is reached within rounding, one token more or less is right too.
        assert abs(int((weights[row] >= bisected[row]).sum()) - wanted) <= 1
        if is_exact[row]:
            assert abs(int((weights[row] >= candidates[row]).sum()) - wanted) <= 1
        else:
            assert wanted > 100 or settings[row]["top_k"] >= 128
    assert 10 < is_exact.sum() < 64


def test_a_tie_at_the_last_candidate_is_left_to_bisection() -> None:
    weights = jnp.ones((1, 300), jnp.float32)
    rows = rows_of({"top_k": 3})
    _, is_exact = _candidate_thresholds(weights, rows, 256)
    assert not bool(is_exact[0])
    assert _bisected_thresholds(weights, rows).tolist() == [1.0]


def test_a_peaked_row_whose_other_weights_vanish_needs_no_bisection() -> None:
    weights = jnp.zeros((1, 300), jnp.float32).at[0, 7].set(1.0)
    thresholds, is_exact = _candidate_thresholds(weights, rows_of({"top_k": 64}), 256)
    assert bool(is_exact[0]) and thresholds.tolist() == [0.0]
    logits = np.where(np.arange(300) == 7, 0.0, -500.0).astype(np.float32)[None]
    row = rows_of({"top_k": 64, "top_p": 0.95, "seed": 1})
    assert jit_sample(logits, row, np.zeros(1, np.int32)).tolist() == [7]


def test_the_vocabulary_is_never_sorted() -> None:
    rows, positions = rows_of({"top_k": 3, "top_p": 0.9, "min_p": 0.1}), np.zeros(1, np.int32)
    logits = np.zeros((1, 4096), np.float32)
    program = jit_sample.lower(logits, rows, positions).compile().as_text()
    assert " sort(" not in program
    assert " sort(" in jax.jit(jnp.sort).lower(logits).compile().as_text(), "it would be seen"


@pytest.mark.parametrize("num_tokens", [7, 160, 1000, 4099])
def test_draw_inverts_the_sum_at_its_ends(num_tokens: int) -> None:
    weights = np.zeros((3, num_tokens), np.float32)
    weights[:, [2, num_tokens - 3]] = 0.25
    uniforms = np.array([0.0, 0.49, 1 - 2**-24], np.float32)
    drawn = jax.jit(_draw)(weights, np.zeros(3, np.float32), uniforms)
    assert drawn.tolist() == [2, 2, num_tokens - 3]


@pytest.mark.parametrize("tensor", [2, 4])
def test_vocabulary_split_over_devices_gives_the_same_tokens(
    tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_module, "NUM_CANDIDATES", 64)
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(6, 160)).astype(np.float32) * 2
    rows = rows_of(*({"seed": 9, **one} for one in SETTINGS))
    positions = np.arange(6, dtype=np.int32)
    mesh = make_worker_mesh(jax.devices()[:tensor], tensor=tensor, expert=1, num_cached_heads=2)
    sharding = sharding_for(mesh, ("batch", "vocab"), logits.shape)
    assert "tensor" in str(sharding.spec)

    def sampled(x: jax.Array, r: SamplingRows, p: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jit_sample(x, r, p), jit_sample(x, greedy_rows(6), p)

    split = jax.jit(sampled)(jax.device_put(logits, sharding), rows, positions)
    whole = jax.jit(sampled)(logits, rows, positions)
    for one, other in zip(split, whole, strict=True):
        assert one.tolist() == other.tolist()
