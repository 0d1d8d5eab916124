"""Checkpoint → arrays on meshes: equal numbers everywhere, each read once, nothing bad accepted."""

import json
import logging
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.checkpoint import load
from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import open_model
from jpd.checkpoint.progress import Progress
from jpd.checkpoint.safetensors_source import INDEX_NAME
from jpd.checkpoint.source import HostArray, Slices, TensorInfo
from jpd.errors import ConfigError
from jpd.nn.families import FAMILIES
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh
from jpd.parallel.sharding import sharding_for
from tests.checkpoint.loading import (
    assert_equal_params,
    load_model,
    make_meshes,
    read_tensors,
    write_tensors,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
GOLDEN_FOLDERS = sorted(p.parent for p in GOLDEN.rglob("config.json"))
Q_NAME = "model.layers.0.self_attn.q_proj.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


class CountingSource:
    """A source that counts how many numbers of each tensor were read."""

    def __init__(self, source: object) -> None:
        self._source = source
        self.num_read: dict[str, int] = {}
        self.largest_read = 0

    @property
    def location(self) -> str:
        return self._source.location

    @property
    def names(self) -> frozenset[str]:
        return self._source.names

    def info(self, name: str) -> TensorInfo:
        return self._source.info(name)

    def file_of(self, name: str) -> str:
        return self._source.file_of(name)

    def read(self, name: str) -> HostArray:
        raise AssertionError("the loader reads slices")

    def read_slice(self, name: str, slices: Slices) -> HostArray:
        values = self._source.read_slice(name, slices)
        self.num_read[name] = self.num_read.get(name, 0) + values.size
        self.largest_read = max(self.largest_read, values.size)
        return values


@pytest.fixture
def no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that puts anything on a device."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("device memory was taken")

    monkeypatch.setattr(load.jax, "device_put", refuse)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(open_model(str(folder)))
    return str(caught.value)


def set_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("folder", GOLDEN_FOLDERS, ids=lambda folder: folder.name)
def test_every_mesh_gets_the_numbers_of_the_file_in_its_own_shardings(folder: Path) -> None:
    """All families, with experts split too where there are any."""
    model = open_model(str(folder))
    heads = model.config.num_cached_heads
    sizes = (1, 2) if model.config.num_heads % 2 == 0 else (1, model.config.num_heads)
    meshes = make_meshes(heads, sizes)
    if any(layer.moe is not None for layer in model.config.layers):
        devices = jax.devices()[4:8]
        meshes.append(make_worker_mesh(devices, tensor=2, expert=2, num_cached_heads=heads))
    abstract = abstract_params(model.config, jnp.float32)
    loaded = load_params(model.require_source(), model.config, abstract, meshes, jnp.float32)
    refs = FAMILIES[model.config.family].tensors(model.config)
    tensors = read_tensors(folder)
    for spec, *arrays in zip(abstract.specs, *loaded, strict=True):
        expected = refs[spec.path].read(lambda name, slices: tensors[name][slices])
        for array, mesh in zip(arrays, meshes, strict=True):
            assert array.sharding == sharding_for(mesh, spec.axes, spec.shape)
            np.testing.assert_array_equal(np.asarray(array), expected.astype(np.float32))


def test_numbers_are_those_of_the_file(golden_llama3: Path) -> None:
    (params,) = load_model(open_model(str(golden_llama3)))
    tensors = read_tensors(golden_llama3)
    q = tensors[Q_NAME].astype(np.float32)  # [heads * head_dim, embed]
    expected = q.reshape(2, 2, 16, 64).transpose(3, 0, 1, 2)
    np.testing.assert_array_equal(np.asarray(params["layers.0.attn.q.weight"]), expected)
    table = np.asarray(params["embed.weight"])
    np.testing.assert_array_equal(table, tensors[EMBED].astype(np.float32))


@pytest.mark.parametrize("sizes", [(4,), (2, 4), (1, 2, 4)])
def test_each_number_is_read_once_whatever_the_meshes(
    golden_llama3: Path, sizes: tuple[int, ...]
) -> None:
    model = open_model(str(golden_llama3))
    source = CountingSource(model.require_source())
    abstract = abstract_params(model.config, jnp.float32)
    meshes = make_meshes(model.config.num_cached_heads, sizes)
    load_params(source, model.config, abstract, meshes, jnp.float32, check_numbers=False)
    assert source.num_read == {n: math.prod(source.info(n).shape) for n in source.names}


def test_a_split_tensor_is_read_in_parts(golden_llama3: Path) -> None:
    model = open_model(str(golden_llama3))
    source = CountingSource(model.require_source())
    abstract = abstract_params(model.config, jnp.float32)
    meshes = make_meshes(model.config.num_cached_heads, (4,))
    load_params(source, model.config, abstract, meshes, jnp.float32, check_numbers=False)
    largest = max(math.prod(source.info(name).shape) for name in source.names)
    assert source.largest_read == largest // 4


def test_weights_may_be_stored_as_bfloat16_on_devices(golden_llama3: Path) -> None:
    model = open_model(str(golden_llama3))
    abstract = abstract_params(model.config, jnp.bfloat16)
    (leaves,) = load_params(
        model.require_source(), model.config, abstract, make_meshes(2, (2,)), jnp.bfloat16
    )
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_may_be_stored_in_any_float_and_in_shards(
    checkpoint: Path, dtype: type[np.floating]
) -> None:
    """The other folders hold bfloat16 in one file."""
    tensors = {name: values.astype(dtype) for name, values in read_tensors(checkpoint).items()}
    (checkpoint / "model.safetensors").unlink()
    weight_map = {}
    for part in range(2):
        file = f"model-{part}.safetensors"
        names = sorted(tensors)[part::2]
        write_tensors(checkpoint, {name: tensors[name] for name in names}, file)
        weight_map |= dict.fromkeys(names, file)
    (checkpoint / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    one, split = load_model(open_model(str(checkpoint)), (1, 2))
    assert_equal_params(one, split)
    table = np.asarray(one["embed.weight"])
    np.testing.assert_array_equal(table, tensors[EMBED].astype(np.float32))


def test_progress_counts_all_bytes_and_estimates_the_rest(golden_llama3: Path) -> None:
    model = open_model(str(golden_llama3))
    abstract = abstract_params(model.config, jnp.float32)
    seen: list[Progress] = []
    load_params(
        model.require_source(),
        model.config,
        abstract,
        make_meshes(2, (1,)),
        jnp.float32,
        seen.append,
    )
    loading = [step for step in seen if step.phase == "loading"]
    assert [step.phase for step in seen] == sorted(step.phase for step in seen)  # checking first
    assert loading[-1].done_bytes == loading[-1].total_bytes == 4 * abstract.num_params
    assert loading[-1].seconds_left == 0
    half = Progress("loading", 50, 100, 2.0, "x")
    assert half.seconds_left == pytest.approx(2.0)


@pytest.mark.usefixtures("no_device_memory")
def test_f01_missing_tensors_are_all_named_before_memory_is_taken(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    names = [Q_NAME, "model.layers.2.mlp.up_proj.weight"]
    write_tensors(checkpoint, {k: v for k, v in tensors.items() if k not in names})
    message = refusal(checkpoint)
    assert all(name in message for name in names)


def test_f01_an_unknown_tensor_is_only_warned_of(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = read_tensors(checkpoint)
    write_tensors(checkpoint, tensors | {"model.vision.weight": tensors[Q_NAME]})
    with caplog.at_level(logging.WARNING):
        load_model(open_model(str(checkpoint)))
    assert "model.vision.weight" in caplog.text


@pytest.mark.usefixtures("no_device_memory")
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model.layers.0.self_attn.q_proj.bias", "a layer of this config has no such tensor"),
        ("model.layers.3.mlp.up_proj.weight", "the config has 3 layers"),
    ],
)
def test_a_tensor_that_a_layer_would_need_is_refused(
    checkpoint: Path, name: str, rule: str
) -> None:
    """Without it the model would say something else: the config does not describe the weights."""
    write_tensors(checkpoint, read_tensors(checkpoint) | {name: np.ones((64,), np.float32)})
    message = refusal(checkpoint)
    assert f"model.safetensors: {name} = [64]: {rule}" in message


def test_layers_that_draft_further_tokens_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "deepseek"
    shutil.copytree(GOLDEN / "variants" / "deepseek_yarn", folder)
    name = "model.layers.2.mlp.gate.weight"
    write_tensors(folder, read_tensors(folder) | {name: np.ones((2, 2), np.float32)})
    load_model(open_model(str(folder)))
    assert name in caplog.text


@pytest.mark.parametrize("same", [True, False])
def test_f03_a_head_beside_tied_embeddings_is_not_used(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, same: bool
) -> None:
    tensors = read_tensors(checkpoint)
    (expected,) = load_model(open_model(str(checkpoint)))
    head = tensors[EMBED] if same else tensors[EMBED] + tensors[EMBED]
    write_tensors(checkpoint, tensors | {HEAD: head})
    with caplog.at_level(logging.WARNING):
        (params,) = load_model(open_model(str(checkpoint)))
    assert_equal_params(params, expected)
    assert ("differs" in caplog.text) is not same


@pytest.mark.usefixtures("no_device_memory")
def test_f04_an_untied_model_needs_its_head(checkpoint: Path) -> None:
    set_config(checkpoint, tie_word_embeddings=False)
    assert HEAD in refusal(checkpoint)


@pytest.mark.usefixtures("no_device_memory")
def test_f04_a_tied_model_needs_its_embeddings(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    write_tensors(checkpoint, {HEAD: tensors.pop(EMBED), **tensors})
    assert EMBED in refusal(checkpoint)


@pytest.mark.usefixtures("no_device_memory")
def test_f05_a_wrong_shape_is_named_with_both_values(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    write_tensors(checkpoint, tensors | {Q_NAME: tensors[Q_NAME][:32]})
    message = refusal(checkpoint)
    assert f"{Q_NAME} = [32, 64]" in message
    assert "[64, 64]" in message


@pytest.mark.usefixtures("no_device_memory")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(checkpoint: Path, bad: float) -> None:
    tensors = read_tensors(checkpoint)
    tensors[Q_NAME][5, 6] = bad
    write_tensors(checkpoint, tensors)
    message = refusal(checkpoint)
    assert "model.safetensors" in message
    assert f"{Q_NAME} = '1 of 4096 numbers'" in message


@pytest.mark.usefixtures("no_device_memory")
def test_integer_weights_are_refused(checkpoint: Path) -> None:
    tensors = read_tensors(checkpoint)
    write_tensors(checkpoint, tensors | {Q_NAME: np.zeros((64, 64), np.int8)})
    assert "must be floating-point" in refusal(checkpoint)


@pytest.mark.usefixtures("no_device_memory")
def test_a_mesh_that_does_not_divide_the_model_is_refused(checkpoint: Path) -> None:
    model = open_model(str(checkpoint))
    with pytest.raises(ConfigError, match="group = 2 is not divisible by replica = 4"):
        load_model(model, (8,))


def test_tied_embeddings_are_stored_once(golden_llama3: Path) -> None:
    (params,) = load_model(open_model(str(golden_llama3)))
    assert "head.weight" not in params
    shape = params["embed.weight"].shape
    assert sum(array.shape == shape for array in jax.tree.leaves(params)) == 1
