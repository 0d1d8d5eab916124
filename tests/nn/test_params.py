"""Parameters as a flat list: shapes, axes, dtypes; the network traced in every storage dtype."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.typing import DTypeLike

from jpd.nn.decoder import PagedBatch
from jpd.nn.families import FAMILIES, config_from_hf
from jpd.nn.params import abstract_params, rebuild
from jpd.parallel.sharding import RULES
from tests.nn.golden import GOLDEN

FOLDERS = sorted(path.parent for path in GOLDEN.glob("**/expected.npz"))
UNSPLIT_AXES = {"embed", "head_dim", "q_rank", "kv_rank", "routed"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.bfloat16)]
)
def test_every_family_is_traced_in_every_dtype(
    folder: Path, dtype: DTypeLike, kv_dtype: DTypeLike
) -> None:
    """Nothing is promoted by accident: strict promotion would raise."""
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    abstract = abstract_params(config, dtype)

    def forward(leaves: Any, tokens: Any, kv: Any, batch: Any) -> Any:
        decoder = rebuild(abstract.graphdef, leaves)
        hidden, kv = decoder(tokens, tokens, kv, batch)
        return hidden, decoder.logits(hidden), kv

    leaves = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in abstract.specs)
    pages = jax.ShapeDtypeStruct((5, 4, config.num_cached_heads, config.kv_width), kv_dtype)
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    shapes: Any = [((2, 2), jnp.int32), ((2,), jnp.int32), ((2, 3), jnp.bool_)]
    batch = PagedBatch(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    kv = (pages,) * config.num_layers
    hidden, logits, new_kv = jax.eval_shape(forward, leaves, tokens, kv, batch)
    assert (hidden.dtype, hidden.shape) == (dtype, (2, 3, config.embed_dim))
    assert (logits.dtype, logits.shape) == (jnp.float32, (2, 3, config.vocab_size))
    assert [(page.dtype, page.shape) for page in new_kv] == [(kv_dtype, pages.shape)] * len(kv)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_param_has_axes_and_a_place_in_the_checkpoint(folder: Path) -> None:
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    specs = abstract_params(config, jnp.bfloat16).specs
    refs = FAMILIES[config.family].tensors(config)
    assert sorted(refs) == sorted({spec.path for spec in specs})
    for spec in specs:
        assert refs[spec.path].shape == spec.shape, spec.path
        assert len(spec.axes) == len(spec.shape), spec.path
        assert set(spec.axes) <= RULES.keys() | UNSPLIT_AXES, spec.path


def test_what_decides_between_experts_is_never_rounded() -> None:
    config = config_from_hf(json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text()))
    specs = abstract_params(config, jnp.bfloat16).specs
    wide = {spec.path for spec in specs if spec.dtype == jnp.float32}
    assert wide == {f"layers.{i}.moe.score_correction" for i in (1, 2)}


def test_leaves_come_back_in_their_places() -> None:
    config = config_from_hf(json.loads((GOLDEN / "llama3" / "config.json").read_text()))
    abstract = abstract_params(config, jnp.float32)
    leaves = [jnp.full(spec.shape, i, spec.dtype) for i, spec in enumerate(abstract.specs)]
    decoder = rebuild(abstract.graphdef, leaves)
    places = {spec.path: i for i, spec in enumerate(abstract.specs)}
    assert decoder.embed.weight[0, 0] == places["embed.weight"]
    assert decoder.layers[2].mlp.down.weight[0, 0] == places["layers.2.mlp.down.weight"]
    assert decoder.layers[1].attn_norm.weight[0] == places["layers.1.attn_norm.weight"]
