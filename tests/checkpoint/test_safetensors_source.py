"""Folders of safetensors files: what is read, what is ignored, what is refused."""

import json
import logging
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jpd.checkpoint.safetensors_source import INDEX_NAME, open_safetensors
from jpd.errors import ConfigError
from tests.checkpoint.loading import Tensors, read_tensors, write_tensors

Q_NAME = "model.layers.0.self_attn.q_proj.weight"


def shard(folder: Path, num_shards: int = 2) -> Tensors:
    """Cut the checkpoint into shards with an index; returns its tensors."""
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(num_shards):
        file_name = f"model-{index + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[index::num_shards]}
        write_tensors(folder, part, file_name)
        weight_map |= dict.fromkeys(part, file_name)
    write_index(folder, weight_map)
    return tensors


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    return weight_map


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_safetensors(folder)
    return str(caught.value)


def rewrite_header(path: Path, **changes: object) -> None:
    """Change fields of the first tensor's header entry and leave the data as they are."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")
    header[name].update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_slices_are_those_of_the_whole_tensor(checkpoint: Path, dtype: type) -> None:
    write_tensors(checkpoint, {Q_NAME: read_tensors(checkpoint)[Q_NAME].astype(dtype)})
    source = open_safetensors(checkpoint)
    whole = source.read(Q_NAME)
    assert whole.dtype == np.dtype(dtype)
    assert source.info(Q_NAME) == (whole.shape, whole.dtype)
    part = source.read_slice(Q_NAME, (slice(3, 7), slice(10, 64)))
    np.testing.assert_array_equal(part, whole[3:7, 10:64])


def test_shards_give_the_same_tensors_as_one_file(checkpoint: Path) -> None:
    tensors = shard(checkpoint, 3)
    source = open_safetensors(checkpoint)
    assert source.names == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(source.read(name), values)


def test_f01_a_missing_shard_is_named(checkpoint: Path) -> None:
    shard(checkpoint)
    missing = checkpoint / "model-00002-of-00002.safetensors"
    missing.unlink()
    assert missing.name in refusal(checkpoint)


def test_f01_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)


def test_f01_a_tensor_that_its_shard_does_not_hold_is_named(checkpoint: Path) -> None:
    shard(checkpoint)
    weight_map = read_index(checkpoint)
    other = next(value for value in weight_map.values() if value != weight_map[Q_NAME])
    write_index(checkpoint, weight_map | {Q_NAME: other})
    message = refusal(checkpoint)
    assert Q_NAME in message
    assert other in message


def test_f02_only_indexed_tensors_are_used(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = shard(checkpoint)
    wrong = np.full_like(tensors[Q_NAME], 7)
    write_tensors(checkpoint, {Q_NAME: wrong})  # a stray model.safetensors
    other = next(f for f in read_index(checkpoint).values() if f != read_index(checkpoint)[Q_NAME])
    stale = {name: tensors[name] for name, file in read_index(checkpoint).items() if file == other}
    write_tensors(checkpoint, stale | {Q_NAME: wrong}, other)
    with caplog.at_level(logging.WARNING):
        source = open_safetensors(checkpoint)
    np.testing.assert_array_equal(source.read(Q_NAME), tensors[Q_NAME])
    assert "model.safetensors" in caplog.text
    assert Q_NAME in caplog.text


def test_several_files_without_an_index_are_refused(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / INDEX_NAME).unlink()
    assert INDEX_NAME in refusal(checkpoint)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / INDEX_NAME).write_text(text)
    assert INDEX_NAME in refusal(checkpoint)


def test_an_index_cannot_point_out_of_the_folder(checkpoint: Path) -> None:
    write_index(checkpoint, {Q_NAME: "../llama3/model.safetensors"})
    assert "../llama3/model.safetensors" in refusal(checkpoint)


def test_a_truncated_file_is_refused_with_both_sizes(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    path.write_bytes(raw[:-100])
    message = refusal(checkpoint)
    data_bytes = len(raw) - 8 - header_bytes
    assert str(path) in message
    assert f"ends at data byte {data_bytes}, but the file holds {data_bytes - 100}" in message


def test_a_file_cut_off_early_is_one_problem_not_one_for_each_tensor(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    path.write_bytes(raw[: 8 + header_bytes + 10])
    with pytest.raises(ConfigError) as caught:
        open_safetensors(checkpoint)
    assert len(caught.value.problems) == 1
    assert "truncated" in str(caught.value)
    assert "tensors are cut off" in str(caught.value)


def test_a_file_with_bytes_to_spare_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    assert "the header describes" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"shape": [160, 65]}, "need 20800 bytes, the offsets span 20480"),
        ({"shape": [-1, 64]}, "must not be negative"),
        ({"dtype": "F5"}, "dtype must be one of"),
        ({"data_offsets": [0]}, "two data_offsets"),
        ({"data_offsets": [20480, 40960]}, "must follow one another"),
    ],
)
def test_a_header_that_lies_is_refused(
    checkpoint: Path, changes: dict[str, object], rule: str
) -> None:
    rewrite_header(checkpoint / "model.safetensors", **changes)
    assert rule in refusal(checkpoint)


@pytest.mark.parametrize(
    "raw", [b"", b"1234", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"no"]
)
def test_what_is_no_safetensors_file_is_refused(checkpoint: Path, raw: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(raw)
    assert "model.safetensors" in refusal(checkpoint)
