"""Reading and spoiling tiny checkpoints, and loading them on meshes of virtual devices."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import Model
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh

Tensors = dict[str, np.ndarray]
Params = dict[str, jax.Array]


def read_tensors(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def write_tensors(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name)


def make_meshes(num_cached_heads: int, sizes: Sequence[int] = (1, 2, 4)) -> list[Mesh]:
    """Disjoint meshes, one after another over the eight devices."""
    meshes, first = [], 0
    for size in sizes:
        devices = jax.devices()[first : first + size]
        meshes.append(
            make_worker_mesh(devices, tensor=size, expert=1, num_cached_heads=num_cached_heads)
        )
        first += size
    return meshes


def load_model(model: Model, sizes: Sequence[int] = (1,)) -> list[Params]:
    """The parameters by path, on each of the meshes."""
    abstract = abstract_params(model.config, jnp.float32)
    meshes = make_meshes(model.config.num_cached_heads, sizes)
    loaded = load_params(model.require_source(), model.config, abstract, meshes, jnp.float32)
    paths = [spec.path for spec in abstract.specs]
    return [dict(zip(paths, leaves, strict=True)) for leaves in loaded]


def assert_equal_params(left: Params, right: Params, atol: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for path, array in left.items():
        assert array.dtype == right[path].dtype
        np.testing.assert_allclose(
            np.asarray(array), np.asarray(right[path]), rtol=0, atol=atol, err_msg=path
        )
