"""GGUF files: the parameters of the checkpoint they were made from, no broken file accepted."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from jpd.checkpoint.gguf_config import config_from_gguf
from jpd.checkpoint.gguf_file import GgufFile, GgufTensor, open_gguf
from jpd.checkpoint.gguf_source import ARCH_NAMES, LAYER_NAMES, PIECE_NUMBERS, gguf_source
from jpd.checkpoint.model_source import open_model
from jpd.errors import ConfigError
from tests.checkpoint.loading import assert_equal_params, load_model
from tests.support.tiny_gguf import write_gguf

ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
}


GOLDEN_NAMES = [
    "llama2",
    "llama3",
    "mixtral",
    "granite",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
]
NOT_IN_METADATA = {
    "llama3": "scaling for a context of 64, not 8192",
    "gemma2": "query_pre_attn_scalar = 24, not the size of a head",
}


@pytest.fixture(scope="module")
def llama_gguf(golden_llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(golden_llama3, tmp_path_factory.mktemp("gguf") / "llama.gguf")


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    return str(caught.value)


def written(path: Path, fill: Callable[[gguf.GGUFWriter], None], arch: str = "llama") -> GgufFile:
    """A file with metadata of the test's choice and one small tensor."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_f07_parameters_equal_those_of_the_checkpoint(
    repo: Path, tmp_path: Path, name: str
) -> None:
    """Rotary rows are back in half-split order, norms are offsets from one again."""
    checkpoint = open_model(str(repo / "tests" / "golden" / name))
    file = open_model(str(write_gguf(Path(checkpoint.spec), tmp_path / "model.gguf")))
    if name not in NOT_IN_METADATA:
        assert file.config == checkpoint.config
    expected = load_model(checkpoint, (1, 2))
    for left, right in zip(load_model(file, (1, 2)), expected, strict=True):
        assert_equal_params(left, right, atol=1e-7)  # one is added to the norms and taken off again


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0"])
def test_quantised_tensors_are_what_the_package_makes_of_them(
    golden_llama3: Path, tmp_path: Path, kind: str
) -> None:
    path = write_gguf(golden_llama3, tmp_path / "model.gguf", kind)
    source = gguf_source(open_gguf(path))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    stored = tensors["blk.1.ffn_down.weight"]
    assert stored.tensor_type.name == kind
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(64, 96)
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(source.read(name), expected)
    part = source.read_slice(name, (slice(5, 50), slice(32, 40)))
    np.testing.assert_array_equal(part, expected[5:50, 32:40])


def test_slices_of_permuted_rows_cut_heads_anywhere(llama_gguf: Path, golden_llama3: Path) -> None:
    source = gguf_source(open_gguf(llama_gguf))
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = source.read(name)
    for rows in (slice(0, 1), slice(7, 23), slice(16, 32), slice(63, 64)):
        part = source.read_slice(name, (rows, slice(3, 9)))
        np.testing.assert_array_equal(part, whole[rows, 3:9])


def test_tensors_larger_than_a_piece_are_put_together(tmp_path: Path) -> None:
    rows = PIECE_NUMBERS // 32 + 7
    values = np.arange(rows * 32, dtype=np.float32).reshape(rows, 32) % 251
    file = written(tmp_path / "a.gguf", lambda w: w.add_tensor("output.weight", values))
    source = gguf_source(file)
    np.testing.assert_array_equal(source.read("lm_head.weight"), values)
    last = source.read_slice("lm_head.weight", (slice(rows - 3, rows), slice(0, 32)))
    np.testing.assert_array_equal(last, values[-3:])


def test_stacked_experts_are_split(tmp_path: Path) -> None:
    stacked = np.arange(3 * 4 * 32, dtype=np.float32).reshape(3, 4, 32)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(3)
        writer.add_tensor("blk.0.ffn_up_exps.weight", stacked)

    source = gguf_source(written(tmp_path / "a.gguf", fill))
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    np.testing.assert_array_equal(source.read(name), stacked[1])
    assert source.info(name).shape == (4, 32)


@pytest.mark.parametrize("arch", ARCHS)
def test_names_agree_with_the_package(arch: str) -> None:
    theirs = gguf.get_tensor_name_map(ARCHS[arch], 3)
    checked = 0
    for stored, name in {**LAYER_NAMES, **ARCH_NAMES.get(arch, {})}.items():
        found = theirs.get_name(f"model.layers.2.{name}".replace(".{expert}", ""))
        is_known = f"blk.2.{stored}" in {value for _, value in theirs.mapping.values()}
        if is_known and found is not None:
            assert found == f"blk.2.{stored}"
            checked += 1
    assert checked >= 8


def test_the_config_is_that_of_the_checkpoint(golden_gemma3: Path, tmp_path: Path) -> None:
    found = config_from_gguf(open_gguf(write_gguf(golden_gemma3, tmp_path / "gemma.gguf")))
    expected = json.loads((golden_gemma3 / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "rms_norm_eps", "head_dim", "sliding_window"):
        assert found[key] == expected[key], key
    ours = open_model(str(tmp_path / "gemma.gguf")).config
    assert ours == open_model(str(golden_gemma3)).config


def test_f06_llama3_scaling_is_found_from_its_factors(tmp_path: Path) -> None:
    head_dim, theta, factor = 128, 500000.0, 8.0
    turns = 8192 * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)

    def fill(writer: gguf.GGUFWriter, values: np.ndarray = factors) -> None:
        writer.add_rope_freq_base(theta)
        writer.add_key_length(head_dim)
        writer.add_tensor("rope_freqs.weight", values)

    rope = config_from_gguf(written(tmp_path / "a.gguf", fill))["rope_parameters"]
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == factor
    strange = written(tmp_path / "b.gguf", lambda w: fill(w, factors[::-1].copy()))
    assert "rope_freqs.weight" in refusal(lambda: config_from_gguf(strange))


def test_unknown_architectures_and_tensors_are_named(tmp_path: Path) -> None:
    other = written(tmp_path / "a.gguf", lambda w: None, "mamba")
    assert "'mamba'" in refusal(lambda: config_from_gguf(other))
    ones = np.ones((2, 32), np.float32)
    odd = written(tmp_path / "b.gguf", lambda w: w.add_tensor("blk.0.ssm_a.weight", ones))
    assert "blk.0.ssm_a.weight" in refusal(lambda: gguf_source(odd))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.sliding_window", 512),
        ("expert_group_count", 8),
        ("attention.value_length", 16),
        ("rope.dimension_count", 4),
        ("rope.scaling.type", "odd"),
    ],
)
def test_metadata_that_changes_the_computation_is_never_ignored(
    tmp_path: Path, key: str, value: object
) -> None:
    file = written(tmp_path / "a.gguf", lambda w: None)
    changed = GgufFile(
        file.path, dict(file.metadata) | {f"llama.{key}": value}, file.tensors, file.buffer
    )
    assert config_from_gguf(file)["model_type"] == "llama"
    assert f"llama.{key} = {value!r}" in refusal(lambda: config_from_gguf(changed))


def test_which_layers_of_gemma3_slide(golden_gemma3: Path, tmp_path: Path) -> None:
    file = open_gguf(write_gguf(golden_gemma3, tmp_path / "a.gguf"))
    for pattern in (3, [True, True, False, True, True, False]):
        metadata = dict(file.metadata) | {"gemma3.attention.sliding_window_pattern": pattern}
        metadata["gemma3.rope.freq_base_swa"] = 5000.0
        config = config_from_gguf(GgufFile(file.path, metadata, file.tensors, file.buffer))
        kinds = [kind == "full_attention" for kind in config["layer_types"]]
        assert kinds == [False, False, True] * 2
        assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 5000.0


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf", lambda w: None)
    metadata = {k: v for k, v in file.metadata.items() if k != "llama.block_count"}
    broken = GgufFile(file.path, metadata, file.tensors, file.buffer)
    assert "llama.block_count" in refusal(lambda: config_from_gguf(broken))


def test_layers_that_differ_in_size_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf", lambda w: None)
    metadata = dict(file.metadata) | {"llama.attention.head_count_kv": np.array([4, 2])}
    uneven = GgufFile(file.path, metadata, file.tensors, file.buffer)
    assert "layers that differ" in refusal(lambda: config_from_gguf(uneven))


def test_a_truncated_file_names_tensor_and_both_sizes(llama_gguf: Path, tmp_path: Path) -> None:
    raw = llama_gguf.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw[:-40])
    last = max(open_gguf(llama_gguf).tensors.values(), key=lambda tensor: tensor.offset)
    message = refusal(lambda: open_gguf(path))
    assert f"{path}: {last.name} = {len(raw) - 40}" in message
    assert f"up to byte {last.offset + last.num_bytes}" in message


def test_every_cut_of_the_header_is_refused(llama_gguf: Path, tmp_path: Path) -> None:
    raw = llama_gguf.read_bytes()
    first = min(tensor.offset for tensor in open_gguf(llama_gguf).tensors.values())
    path = tmp_path / "cut.gguf"
    for size in [*range(64), *range(64, first, 97)]:
        path.write_bytes(raw[:size])
        assert str(path) in refusal(lambda: open_gguf(path))


@pytest.mark.parametrize(
    ("offset", "data", "word"),
    [
        (0, b"GGML", "magic"),
        (4, struct.pack("<I", 9), "version"),
        (4, struct.pack(">I", 3), "version"),
        (8, struct.pack("<Q", 1 << 40), "truncated"),
        (16, struct.pack("<Q", 1 << 40), "truncated"),
        (24, struct.pack("<Q", 1 << 62), "truncated"),
    ],
)
def test_a_header_that_lies_is_refused(
    llama_gguf: Path, tmp_path: Path, offset: int, data: bytes, word: str
) -> None:
    raw = bytearray(llama_gguf.read_bytes())
    raw[offset : offset + len(data)] = data
    path = tmp_path / "lie.gguf"
    path.write_bytes(raw)
    assert word in refusal(lambda: open_gguf(path))


def test_a_tensor_of_an_unknown_quantisation_is_refused(llama_gguf: Path, tmp_path: Path) -> None:
    raw = bytearray(llama_gguf.read_bytes())
    name = b"blk.0.ffn_down.weight"
    kind_at = raw.index(name) + len(name) + 4 + 2 * 8
    raw[kind_at : kind_at + 4] = struct.pack("<I", 250)
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw)
    assert "quantisation is not known" in refusal(lambda: open_gguf(path))


def test_a_missing_tensor_is_found_before_loading(golden_llama3: Path, tmp_path: Path) -> None:
    path = write_gguf(golden_llama3, tmp_path / "a.gguf", without=["blk.1.ffn_up.weight"])
    message = refusal(lambda: load_model(open_model(str(path))))
    assert "model.layers.1.mlp.up_proj.weight" in message


def test_numbers_that_are_not_finite_are_refused(llama_gguf: Path, tmp_path: Path) -> None:
    tensor: GgufTensor = open_gguf(llama_gguf).tensors["blk.2.ffn_up.weight"]
    raw = bytearray(llama_gguf.read_bytes())
    raw[tensor.offset : tensor.offset + 4] = np.float32(np.nan).tobytes()
    path = tmp_path / "nan.gguf"
    path.write_bytes(raw)
    message = refusal(lambda: load_model(open_model(str(path))))
    assert "blk.2.ffn_up.weight" in message
