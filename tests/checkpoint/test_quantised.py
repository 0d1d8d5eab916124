"""Folders of float8 and MXFP4: what they stand for, read in parts, and every way to be wrong.

quantised/ holds tiny checkpoints with the logits of transformers 5.24, which dequantised them.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jpd.checkpoint.convert import convert
from jpd.checkpoint.dequantised_source import DequantisedSource, dequantised
from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import open_model
from jpd.checkpoint.safetensors_source import open_safetensors
from jpd.checkpoint.source import HostArray, Slices, TensorInfo
from jpd.errors import ConfigError
from jpd.nn.families import FAMILIES
from jpd.nn.families.quantization import FP8, MXFP4, StoredQuantization
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh
from tests.checkpoint.loading import load_model, make_meshes
from tests.nn.golden import GoldenModel

FOLDER = Path(__file__).parent / "quantised"
NAMES = ("deepseek_fp8", "gpt_oss_mxfp4")
FLOAT8 = ml_dtypes.float8_e4m3fn
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


class ArraySource:
    """Tensors in memory that remember how many numbers of each were read."""

    location = "here"

    def __init__(self, arrays: Mapping[str, HostArray]) -> None:
        self.arrays = dict(arrays)
        self.num_read = dict.fromkeys(arrays, 0)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.arrays)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self.arrays[name].shape, self.arrays[name].dtype)

    def file_of(self, name: str) -> str:
        return f"file of {name}"

    def read(self, name: str) -> HostArray:
        return self.read_slice(name, ())

    def read_slice(self, name: str, slices: Slices) -> HostArray:
        values = self.arrays[name][slices]
        self.num_read[name] += values.size
        return values


def float8(shape: tuple[int, int] = (40, 50), block: int = 16) -> ArraySource:
    rng = np.random.default_rng(0)
    scales = [-(-dim // block) for dim in shape]
    return ArraySource(
        {
            "w": rng.standard_normal(shape, np.float32).astype(FLOAT8),
            "w_scale_inv": rng.random(scales, np.float32),
            "norm": np.ones(3, np.float32),
        }
    )


def mxfp4(num_experts: int = 3, out_dim: int = 6, num_blocks: int = 2) -> ArraySource:
    rng = np.random.default_rng(0)
    shape = (num_experts, out_dim, num_blocks)
    return ArraySource(
        {
            "w_blocks": rng.integers(0, 256, (*shape, 16), np.uint8),
            "w_scales": rng.integers(0, 255, shape, np.uint8),
        }
    )


def open_float8(source: ArraySource) -> DequantisedSource:
    return dequantised(source, StoredQuantization(FP8, (16, 16)))


def open_mxfp4(source: ArraySource) -> DequantisedSource:
    return dequantised(source, StoredQuantization(MXFP4))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    source = open_model(str(FOLDER / name)).require_source()
    tensors = {tensor: source.read(tensor) for tensor in source.names}
    model = GoldenModel(FOLDER / name, tensors)
    logits = model.whole(model.expected["prompts"])
    np.testing.assert_allclose(logits, model.expected["logits"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_devices_get_their_parts_of_the_same_numbers(name: str) -> None:
    model = open_model(str(FOLDER / name))
    source, heads = model.require_source(), model.config.num_cached_heads
    abstract = abstract_params(model.config, jnp.float32)
    devices = make_meshes(heads, (4,))[0].devices.flatten().tolist()
    split = make_worker_mesh(devices, tensor=2, expert=2, num_cached_heads=heads)
    meshes = [split, *make_meshes(heads, (1,))]
    loaded = load_params(source, model.config, abstract, meshes, jnp.float32)
    refs = FAMILIES[model.config.family].tensors(model.config)
    for spec, *arrays in zip(abstract.specs, *loaded, strict=True):
        expected = refs[spec.path].read(source.read_slice).astype(np.float32)
        for array in arrays:
            np.testing.assert_array_equal(np.asarray(array), expected, err_msg=spec.path)


@pytest.mark.parametrize("shape", [(40, 50), (32, 16), (3, 5)])
def test_float8_times_the_scale_of_its_block(shape: tuple[int, int]) -> None:
    """The last blocks may be cut, as 576 rows of DeepSeek's latent are."""
    source = float8(shape)
    opened = open_float8(source)
    assert opened.names == {"w", "norm"}
    assert opened.info("w") == (shape, np.float32)
    expected = source.arrays["w"].astype(np.float32)
    for row in range(shape[0]):
        for column in range(shape[1]):
            expected[row, column] *= source.arrays["w_scale_inv"][row // 16, column // 16]
    np.testing.assert_array_equal(opened.read("w"), expected)
    part = (slice(1, shape[0] - 1), slice(shape[1] // 3, shape[1]))
    np.testing.assert_array_equal(opened.read_slice("w", part), expected[part])


def test_float8_scales_may_be_powers_of_two_in_a_byte() -> None:
    source = float8((16, 32))
    source.arrays["w_scale_inv"] = np.array([[0.5, 4]]).astype(ml_dtypes.float8_e8m0fnu)
    whole = source.arrays["w"].astype(np.float32)
    expected = np.hstack([whole[:, :16] / 2, whole[:, 16:] * 4])
    np.testing.assert_array_equal(open_float8(source).read("w"), expected)


def test_mxfp4_is_a_sign_two_bits_one_bit_and_a_scale() -> None:
    source = mxfp4()
    opened = open_mxfp4(source)
    assert opened.names == {"w"}
    assert opened.info("w") == ((3, 64, 6), jnp.bfloat16)
    blocks, scales = source.arrays["w_blocks"], source.arrays["w_scales"]
    expected = np.zeros((3, 64, 6), np.float32)
    for expert, row, block, byte in np.ndindex(*blocks.shape):
        for half, bits in enumerate(
            (blocks[expert, row, block, byte] & 15, blocks[expert, row, block, byte] >> 4)
        ):
            value = (
                (-1 if bits >> 3 else 1)
                * E2M1[bits & 7]
                * 2.0 ** (int(scales[expert, row, block]) - 127)
            )
            expected[expert, 32 * block + 2 * byte + half, row] = value
    np.testing.assert_array_equal(opened.read("w").astype(np.float32), expected)
    part = (slice(1, 3), slice(7, 45), slice(2, 5))
    np.testing.assert_array_equal(opened.read_slice("w", part).astype(np.float32), expected[part])


def test_only_the_part_that_is_asked_for_is_read() -> None:
    source = mxfp4()
    open_mxfp4(source).read_slice("w", (slice(1, 2), slice(0, 32), slice(0, 6)))
    assert source.num_read == {"w_blocks": 6 * 16, "w_scales": 6}
    source = float8()
    open_float8(source).read_slice("w", (slice(0, 16), slice(0, 50)))
    assert source.num_read == {"w": 16 * 50, "w_scale_inv": 4, "norm": 0}


def test_a_scale_that_is_not_a_number_is_found() -> None:
    source = mxfp4()
    source.arrays["w_scales"][1, 2, 0] = 255
    values = open_mxfp4(source).read("w").astype(np.float32)
    assert np.isnan(values[1, :32, 2]).all()
    assert np.isfinite(np.delete(values, 1, axis=0)).all()


def refusal(source: ArraySource, method: str) -> str:
    with pytest.raises(ConfigError) as caught:
        dequantised(source, StoredQuantization(method, (16, 16)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"w_scale_inv": None},
            "file of w: w_scale_inv = 'missing': w needs these scales, of shape [3, 4]",
        ),
        (
            {"w_scale_inv": np.ones((3, 3), np.float32)},
            "file of w_scale_inv: w_scale_inv = [3, 3]: "
            "the scales of w of shape [40, 50] must have shape [3, 4]",
        ),
        ({"w_scale_inv": np.ones((3, 4), np.int32)}, "w_scale_inv = 'int32'"),
        ({"w": None}, "the scales of w, which is not there"),
        ({"w": np.ones((2, 40, 50), FLOAT8)}, "w = [2, 40, 50]: a float8 tensor must have two"),
    ],
)
def test_float8_that_does_not_fit_is_refused(
    changes: dict[str, HostArray | None], message: str
) -> None:
    arrays = float8().arrays | changes
    source = ArraySource({name: array for name, array in arrays.items() if array is not None})
    assert message in refusal(source, FP8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_scales": None}, "w_scales = 'missing': w_blocks needs these scales"),
        ({"w_scales": np.ones((3, 6, 1), np.uint8)}, "must have shape [3, 6, 2]"),
        ({"w_blocks": None}, "these scales need w_blocks"),
        ({"w_blocks": np.ones((3, 6, 2, 8), np.uint8)}, "w_blocks = 'uint8 [3, 6, 2, 8]': must be"),
    ],
)
def test_mxfp4_that_does_not_fit_is_refused(
    changes: dict[str, HostArray | None], message: str
) -> None:
    arrays = mxfp4().arrays | changes
    source = ArraySource({name: array for name, array in arrays.items() if array is not None})
    assert message in refusal(source, MXFP4)


def test_float8_without_its_scales_in_the_config_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(FOLDER / "deepseek_fp8", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="weight_scale_inv"):
        load_model(open_model(str(folder)))


def test_float8_is_read_from_the_file_in_parts() -> None:
    source = open_safetensors(FOLDER / "deepseek_fp8")
    name = "model.layers.0.mlp.up_proj.weight"
    whole = source.read(name)
    assert whole.dtype == FLOAT8 and whole.any()
    part = source.read_slice(name, (slice(3, 9), slice(4, 20)))
    np.testing.assert_array_equal(part.astype(np.float32), whole[3:9, 4:20].astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_converted_they_are_plain_numbers(name: str, tmp_path: Path) -> None:
    convert(str(FOLDER / name), tmp_path / "orbax")
    assert "quantization_config" not in json.loads((tmp_path / "orbax/config.json").read_text())
    before, after = (
        load_model(open_model(str(at)))[0] for at in (FOLDER / name, tmp_path / "orbax")
    )
    for path, values in before.items():
        np.testing.assert_array_equal(np.asarray(after[path]), np.asarray(values), err_msg=path)
