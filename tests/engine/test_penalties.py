"""Bias and penalties against their definitions, and the distributions that are drawn with them."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.engine.penalties import with_bias, with_penalties
from jpd.engine.sampling import sample
from jpd.engine.sampling_rows import SamplingRows, greedy_rows, sampling_row
from jpd.request import MAX_LOGIT_BIASES, SamplingParams

VOCAB = 40
PENALTIES = ("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty")
PROMPT = (3, 3, 7, 9, 11)
OUTPUT = (5, 7, 5, 5)
LENGTH = len(PROMPT) + len(OUTPUT)


@jax.jit
def jit_sample(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array, history: jax.Array
) -> jax.Array:
    return sample(logits, rows, positions, lambda: history)


@jax.jit
def changed(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array, history: jax.Array
) -> jax.Array:
    return with_penalties(with_bias(logits, rows), rows, positions, lambda: history)


def by_definition(
    logits: np.ndarray,
    *,
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
    logit_bias: Sequence[tuple[int, float]] = (),
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> np.ndarray:
    """Token by token, in float64."""
    found = logits.astype(np.float64)
    for token_id, bias in logit_bias:
        found[token_id] += bias
    for token_id in {*prompt, *output}:
        better = found[token_id] > 0
        found[token_id] *= 1 / repetition_penalty if better else repetition_penalty
    for token_id, count in Counter(output).items():
        found[token_id] -= presence_penalty + frequency_penalty * count
    return found


def row_and_history(
    settings: dict[str, Any], prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT
) -> tuple[SamplingRows, np.ndarray]:
    """A row whose next token stands behind the output; the history holds rubbish behind that."""
    length = len(prompt) + len(output)
    row = sampling_row(SamplingParams(**settings), (), length, len(output))
    history = np.full((1, length + 4), 1, np.int32)
    history[0, :length] = [*prompt, *output]
    return row, history


def repeated(tree: Any, times: int) -> Any:
    return jax.tree.map(lambda leaf: np.repeat(leaf, times, axis=0), tree)


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.6},
    {"logit_bias": ((5, 2.5), (0, -100.0), (VOCAB - 1, 100.0))},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.4,
        "logit_bias": ((3, -3.0), (5, 4.0)),
    },
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logits_change_as_they_are_defined_to(settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(2).normal(size=(1, VOCAB)).astype(np.float32) * 3
    row, history = row_and_history(settings)
    found = changed(logits, row, np.array([LENGTH], np.int32), history)
    np.testing.assert_allclose(found[0], by_definition(logits[0], **settings), rtol=1e-6, atol=1e-6)


def test_only_output_counts_for_presence_and_frequency() -> None:
    logits = np.ones((1, VOCAB), np.float32)
    row, history = row_and_history({"presence_penalty": 1.0, "frequency_penalty": 1.0}, PROMPT, ())
    found = changed(logits, row, np.array([len(PROMPT)], np.int32), history)
    assert found.tolist() == logits.tolist()


def test_a_full_list_of_biases_with_the_largest_token_id() -> None:
    biases = tuple((token_id, float(token_id % 7)) for token_id in range(MAX_LOGIT_BIASES))
    logits = np.zeros((1, MAX_LOGIT_BIASES), np.float32)
    row, history = row_and_history({"logit_bias": biases})
    found = changed(logits, row, np.array([LENGTH], np.int32), history)
    assert found[0].tolist() == [bias for _, bias in biases]


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS[5],
        {"frequency_penalty": 0.5, "top_k": 9, "temperature": 1.3},
        {"logit_bias": ((5, 1.5), (6, -100.0)), "top_p": 0.8},
        {"repetition_penalty": 1.3, "min_p": 0.05, "temperature": 0.8},
    ],
    ids=str,
)
def test_drawn_tokens_follow_the_exact_distribution(settings: dict[str, Any]) -> None:
    num_draws = 20_000
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32)
    logits[[*PROMPT, *OUTPUT]] += 3.0
    row, history = row_and_history({"seed": 3, **settings})
    rows = repeated(row, num_draws)
    fields = {name: settings[name] for name in settings if name in PENALTIES}
    seeds = np.stack(
        [np.zeros(num_draws, np.uint32), np.arange(num_draws, dtype=np.uint32)], axis=1
    )
    tokens = jit_sample(
        np.tile(logits, (num_draws, 1)),
        dataclasses.replace(rows, seed=seeds),
        np.full(num_draws, LENGTH, np.int32),
        repeated(history, num_draws),
    )
    probs = _filtered(by_definition(logits, **fields), settings)
    expected = probs * num_draws
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    likely = expected >= 5
    chi_square = (((counts - expected) ** 2)[likely] / expected[likely]).sum()
    degrees = likely.sum() - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 3
    plain = _filtered(logits.astype(np.float64), settings) * num_draws
    off = (((counts - plain) ** 2)[plain > 5] / plain[plain > 5]).sum()
    assert off > 10 * degrees, "the penalties change nothing: this test cannot fail"


def _filtered(logits: np.ndarray, settings: dict[str, Any]) -> np.ndarray:
    probs = np.exp((logits - logits.max()) / settings.get("temperature", 1.0))
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    probs[order[settings.get("top_k") or VOCAB :]] = 0
    probs /= probs.sum()
    if "top_p" in settings:
        num_kept = int(np.searchsorted(np.cumsum(probs[order]), settings["top_p"])) + 1
        probs[order[num_kept:]] = 0
    probs[probs < settings.get("min_p", 0.0) * probs.max()] = 0
    return probs / probs.sum()


def test_i4_neighbours_of_a_penalised_row_are_bit_equal() -> None:
    logits = np.random.default_rng(0).normal(size=(3, VOCAB)).astype(np.float32)
    row, history = row_and_history({**SETTINGS[5], "temperature": 0.0})
    plain = greedy_rows(1)
    rows = jax.tree.map(lambda a, b: np.concatenate([a, b, a]), plain, row)
    at = np.full(3, LENGTH, np.int32)
    found = changed(logits, rows, at, np.repeat(history, 3, axis=0))
    assert found[0].tolist() == logits[0].tolist() and found[2].tolist() == logits[2].tolist()
    assert found[1].tolist() != logits[1].tolist()


def test_e14_ids_beyond_the_vocabulary_touch_nothing() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    row, history = row_and_history({"logit_bias": ((VOCAB, 5.0), (VOCAB + 10, 5.0))})
    rows = jax.tree.map(lambda a, b: np.concatenate([a, b]), row, greedy_rows(1))
    found = changed(logits, rows, np.full(2, LENGTH, np.int32), np.repeat(history, 2, axis=0))
    assert not np.asarray(found).any()


def test_a_greedy_row_with_penalties_leaves_the_models_best_token() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, [5, 8]] = [2.0, 1.9]
    row, history = row_and_history({"temperature": 0.0, "frequency_penalty": 0.1})
    assert jit_sample(logits, row, np.array([LENGTH], np.int32), history).tolist() == [8]
    row, history = row_and_history({"temperature": 0.0, "logit_bias": ((9, 7.0),)})
    assert jit_sample(logits, row, np.array([LENGTH], np.int32), history).tolist() == [9]


def test_bias_does_not_defeat_min_tokens() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    settings = SamplingParams(temperature=0.0, min_tokens=2, logit_bias=((2, 100.0),))
    row = sampling_row(settings, (2,), LENGTH)
    history = jnp.zeros((1, 1), jnp.int32)
    tokens = [
        int(jit_sample(logits, row, np.array([LENGTH + step], np.int32), history)[0])
        for step in range(3)
    ]
    assert tokens == [0, 0, 2]
