"""int8 weights: how far the logits of every golden checkpoint move, and where scales come from.

`pytest -s tests/nn/test_int8.py` prints the error of each checkpoint.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.checkpoint.int8 import quantize
from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import open_model
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh
from tests.nn.golden import GOLDEN, GoldenModel, golden_model
from tests.nn.sharded import ShardedModel

NAMES = sorted(str(path.parent.relative_to(GOLDEN)) for path in GOLDEN.glob("**/expected.npz"))


def int8_model(name: str, tensor: int = 1, expert: int = 1) -> GoldenModel:
    """As a server loads it, on one mesh."""
    opened = open_model(str(GOLDEN / name), weights="int8")
    made = GoldenModel(GOLDEN / name)
    made.config = opened.config
    made.abstract = abstract_params(opened.config, jnp.float32)
    mesh = make_worker_mesh(
        jax.devices()[: tensor * expert],
        tensor=tensor,
        expert=expert,
        num_cached_heads=opened.config.num_cached_heads,
    )
    source = opened.require_source()
    (made.leaves,) = load_params(source, made.config, made.abstract, [mesh], jnp.float32)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_logits_stay_close(name: str) -> None:
    """A mixture moves more: rounding sends a token with two close experts to the other one."""
    model = int8_model(name)
    expected = model.expected["logits"]
    got = model.whole(model.expected["prompts"])
    error = np.abs(got - expected)
    agree = np.mean(got.argmax(-1) == expected.argmax(-1))
    figures = f"max |Δlogit| = {error.max():.3g}, mean {error.mean():.3g}, greedy {agree:.1%}"
    print(f"int8 {name}: {figures}")
    is_mixture = any(layer.moe is not None for layer in model.config.layers)
    assert 0 < error.max() < (4.5 if is_mixture else 0.7)
    assert error.mean() < (0.13 if is_mixture else 0.055)
    assert agree > 0.85


@pytest.mark.parametrize(
    ("name", "tensor", "expert"),
    [("llama3", 4, 1), ("gemma3", 2, 1), ("deepseek_v3", 2, 4), ("gpt_oss", 4, 2)],
)
def test_numbers_and_scales_do_not_depend_on_the_mesh(name: str, tensor: int, expert: int) -> None:
    """A scale covers the whole channel, also where devices hold parts of it."""
    alone, split = int8_model(name), int8_model(name, tensor, expert)
    for spec, one, other in zip(alone.abstract.specs, alone.leaves, split.leaves, strict=True):
        assert one.dtype == other.dtype == spec.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=spec.path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tensor", "expert"), [("gemma3", 2, 1), ("qwen3_moe", 2, 2)])
def test_logits_do_not_depend_on_the_mesh(name: str, tensor: int, expert: int) -> None:
    model = int8_model(name)
    prompts = model.expected["prompts"][:1]
    got = ShardedModel(model, tensor=tensor, expert=expert).whole_pass(prompts)
    np.testing.assert_allclose(got, model.whole(prompts), rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3", "gpt_oss"])
def test_matrices_are_int8_and_nothing_else_is(name: str) -> None:
    specs = int8_model(name).abstract.specs
    floats = {spec.path for spec in specs if spec.dtype != jnp.int8 and not spec.is_scale}
    kept = ("norm.weight", "bias", "sinks", "router", "score_correction")
    assert all(path.endswith(kept) for path in floats)
    num_int8 = sum(spec.num_params for spec in specs if spec.dtype == jnp.int8)
    assert num_int8 > 0.9 * sum(spec.num_params for spec in specs)


def test_weights_are_within_half_a_step_of_the_file() -> None:
    exact, rounded = golden_model("llama3"), int8_model("llama3")
    values = dict(zip((s.path for s in exact.abstract.specs), exact.leaves, strict=True))
    leaves = dict(zip((s.path for s in rounded.abstract.specs), rounded.leaves, strict=True))
    weights = [spec for spec in rounded.abstract.specs if spec.summed]
    assert len(weights) == 1 + 7 * exact.config.num_layers
    for spec in weights:
        scale = np.expand_dims(np.asarray(leaves[spec.scale_path]), spec.summed)
        numbers = np.asarray(leaves[spec.path])
        assert np.abs(numbers).max() == 127
        error = np.abs(numbers * scale - np.asarray(values[spec.path]))
        assert np.all(error <= scale * 0.50001), spec.path


def test_a_channel_of_zeros_stays_zero() -> None:
    numbers, scale = quantize(np.array([[0.0, 1.0], [0.0, -4.0]], np.float32), (0,))
    np.testing.assert_array_equal(numbers, [[0, 32], [0, -127]])
    np.testing.assert_allclose(scale, [1.0, 4 / 127])
