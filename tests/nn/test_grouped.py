"""Only the chosen experts, or all of them: the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.nn.grouped import run_chosen
from jpd.nn.params import abstract_params
from tests.nn.golden import GOLDEN, GoldenModel, golden_model
from tests.nn.test_int8 import int8_model

MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe", "variants/qwen3_moe_mixed")


@pytest.mark.parametrize("name", MIXTURES)
def test_the_reference_s_logits(name: str) -> None:
    model = GoldenModel(GOLDEN / name)
    model.abstract = abstract_params(model.config, jnp.float32, is_split=False)
    prompts = model.expected["prompts"]
    got = model.whole(prompts)
    np.testing.assert_allclose(got, model.expected["logits"], rtol=0, atol=2e-4)
    np.testing.assert_allclose(got, golden_model(name).whole(prompts), rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("spread", ["even", "one", "none of the last"])
def test_every_choice_is_computed_once(num_tokens: int, spread: str) -> None:
    """Experts multiply by their number, so that sums show who was asked, and how often."""
    draw = np.random.default_rng(0)
    high = {"even": 6, "one": 1, "none of the last": 4}[spread]
    experts = draw.integers(0, high, (num_tokens, 2)).astype(np.int32)
    weights = draw.random((num_tokens, 2)).astype(np.float32)
    x = draw.standard_normal((num_tokens, 3)).astype(np.float32)

    @jax.jit
    def run(x: jax.Array, experts: jax.Array, weights: jax.Array) -> jax.Array:
        return run_chosen(x, experts, weights, 6, lambda rows, e: rows * (e + 1).astype(rows.dtype))

    expected = x * np.sum(weights * (experts + 1), axis=1, keepdims=True)
    np.testing.assert_allclose(run(x, experts, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_int8_scales_are_those_of_the_expert(name: str) -> None:
    model = int8_model(name)
    prompts = model.expected["prompts"][:1]
    everyone = model.whole(prompts)
    model.abstract = abstract_params(model.config, jnp.float32, is_split=False)
    np.testing.assert_allclose(model.whole(prompts), everyone, rtol=0, atol=2e-4)
