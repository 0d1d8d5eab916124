"""jpd convert, and restoring: on any mesh, nothing half-written, one parameter in memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jpd.checkpoint import convert as convert_module
from jpd.checkpoint.convert import convert
from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import open_model
from jpd.checkpoint.orbax_source import MARKER_NAME, PARAMS_NAME, OrbaxSource
from jpd.checkpoint.progress import Progress
from jpd.errors import ConfigError
from jpd.nn.params import abstract_params
from jpd.parallel.sharding import sharding_for
from tests.checkpoint.loading import (
    assert_equal_params,
    load_model,
    make_meshes,
    read_tensors,
    write_tensors,
)
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_tokenizer import copy_with_tokenizer

Q_NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def converted(golden_llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_with_tokenizer(golden_llama3, tmp_path_factory.mktemp("source") / "tiny")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    return convert(str(source), tmp_path_factory.mktemp("orbax") / "tiny-orbax").folder


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("sizes", [(1,), (2,), (4,), (1, 2, 4)])
def test_f08_restores_on_any_number_of_devices(
    converted: Path, golden_llama3: Path, sizes: tuple[int, ...]
) -> None:
    expected = load_model(open_model(str(golden_llama3)), sizes)
    for found, wanted in zip(load_model(open_model(str(converted)), sizes), expected, strict=True):
        assert_equal_params(found, wanted)


def test_f08_restores_into_the_shardings_of_each_mesh(converted: Path) -> None:
    model = open_model(str(converted))
    abstract = abstract_params(model.config, jnp.bfloat16)
    meshes = make_meshes(model.config.num_cached_heads)
    loaded = load_params(model.require_source(), model.config, abstract, meshes, jnp.bfloat16)
    for leaves, mesh in zip(loaded, meshes, strict=True):
        for spec, leaf in zip(abstract.specs, leaves, strict=True):
            assert leaf.sharding == sharding_for(mesh, spec.axes, spec.shape)
            assert leaf.dtype == jnp.bfloat16


def test_f08_what_one_device_wrote_opens_on_four(golden_llama3: Path, tmp_path: Path) -> None:
    code = (
        "import sys, jax\n"
        "from jpd.checkpoint.convert import convert\n"
        "convert(sys.argv[1], sys.argv[2])\n"
        "assert len(jax.devices()) == 1\n"
    )
    command = [sys.executable, "-c", code, str(golden_llama3), str(tmp_path / "one")]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    (found,) = load_model(open_model(str(tmp_path / "one")), (4,))
    (expected,) = load_model(open_model(str(golden_llama3)), (4,))
    assert_equal_params(found, expected)


def test_opening_starts_no_jax_so_that_a_launcher_can_still_make_its_devices(
    converted: Path,
) -> None:
    code = (
        "import sys, jax\n"
        "from jpd.checkpoint.model_source import open_model\n"
        "from jpd.parallel.platform import ensure_cpu_devices\n"
        "open_model(sys.argv[1])\n"
        "ensure_cpu_devices(2)\n"
        "assert len(jax.devices()) >= 2\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(
        [sys.executable, "-c", code, str(converted)],
        check=True,
        timeout=120,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )


def test_names_and_shapes_are_read_without_data(converted: Path) -> None:
    source = open_model(str(converted)).require_source()
    assert isinstance(source, OrbaxSource)
    abstract = abstract_params(open_model(str(converted)).config, jnp.float32)
    assert source.read_shapes() == {spec.path: spec.shape for spec in abstract.specs}


def test_tokenizer_and_eos_come_along(converted: Path) -> None:
    model = open_model(str(converted))
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("hi 中")) == "hi 中"
    assert model.tokenizer.chat_template is not None
    assert model.eos_token_ids == (2, 5)


def test_a_gguf_file_with_its_tokenizer(golden_gemma3: Path, tmp_path: Path) -> None:
    gguf = write_gguf(golden_gemma3, tmp_path / "tiny.gguf", with_tokenizer=True)
    before = open_model(str(gguf))
    after = open_model(str(convert(str(gguf), tmp_path / "out").folder))
    assert after.config == before.config
    assert after.eos_token_ids == before.eos_token_ids
    assert_equal_params(load_model(after)[0], load_model(before)[0])
    assert before.tokenizer is not None
    assert after.tokenizer is not None
    for text in ("hello  a", "<start_of_turn>user", "<bos>"):
        assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
    messages = [{"role": "user", "content": "hello"}]
    prompt = after.tokenizer.apply_chat_template(messages)
    assert prompt == before.tokenizer.apply_chat_template(messages)


def test_the_dtype_can_be_chosen(golden_llama3: Path, tmp_path: Path) -> None:
    stored = convert(str(golden_llama3), tmp_path / "as-stored")
    assert stored.dtype == "bfloat16"
    wide = convert(str(golden_llama3), tmp_path / "wide", dtype="float32")
    assert wide.dtype == "float32"
    assert wide.num_bytes == 2 * stored.num_bytes
    left, right = (load_model(open_model(str(item.folder)))[0] for item in (stored, wide))
    assert_equal_params(left, right)


def test_int8_is_the_same_whenever_it_is_made(golden_llama3: Path, tmp_path: Path) -> None:
    """While safetensors are loaded, while they are converted, or while floats are restored."""
    direct = load_model(open_model(str(golden_llama3), weights="int8"), (1, 2))
    stored = convert(str(golden_llama3), tmp_path / "int8", weights="int8")
    floats = convert(str(golden_llama3), tmp_path / "float")
    assert stored.num_bytes < 0.6 * floats.num_bytes
    assert stored.num_params == floats.num_params
    later = load_model(open_model(str(floats.folder), weights="int8"), (1, 2))
    opened = open_model(str(stored.folder))
    assert opened.config.weights == "int8"
    for one, other, third in zip(direct, later, load_model(opened, (1, 2)), strict=True):
        assert_equal_params(one, other)
        assert_equal_params(one, third)


def test_rounded_numbers_are_not_served_as_exact_ones(golden_llama3: Path, tmp_path: Path) -> None:
    done = convert(str(golden_llama3), tmp_path / "int8", weights="int8")
    assert open_model(str(done.folder), need_weights=False).config.weights == "int8"
    with pytest.raises(ConfigError, match="was written as int8"):
        open_model(str(done.folder), weights="float")


def test_parameters_are_read_one_after_another(
    golden_llama3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When one is read, all before it are on disk."""
    seen: list[Progress] = []
    reading: list[int] = []
    make_reader = convert_module._reader

    def counted(*args: object) -> object:
        read = make_reader(*args)

        def counting() -> np.ndarray:
            reading.append(sum(step.phase == "writing" for step in seen))
            return read()

        return counting

    monkeypatch.setattr(convert_module, "_reader", counted)
    convert(str(golden_llama3), tmp_path / "out", progress=seen.append)
    assert reading == list(range(len(reading)))
    writing = [step for step in seen if step.phase == "writing"]
    assert writing[-1].done_bytes == writing[-1].total_bytes


def test_a_bad_source_leaves_nothing_behind(checkpoint: Path, tmp_path: Path) -> None:
    tensors = read_tensors(checkpoint)
    tensors[Q_NAME][0, 0] = np.nan
    write_tensors(checkpoint, tensors)
    target = tmp_path / "made" / "out"
    with pytest.raises(ConfigError, match=Q_NAME):
        convert(str(checkpoint), target)
    assert not target.parent.exists()


def test_a_failure_while_writing_leaves_nothing_behind(
    golden_llama3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(convert_module, "_write_description", fail)
    with pytest.raises(ConfigError, match="disk full"):
        convert(str(golden_llama3), tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_a_killed_conversion_leaves_no_checkpoint(golden_llama3: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from jpd.checkpoint.convert import convert\n"
        "def wait(step):\n"
        "    if step.phase == 'writing' and step.done_bytes > step.total_bytes // 2:\n"
        "        print('half', flush=True); time.sleep(100)\n"
        "convert(sys.argv[1], sys.argv[2], progress=wait)\n"
    )
    command = [sys.executable, "-c", code, str(golden_llama3), str(tmp_path / "out")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    assert len(leftovers(tmp_path)) == 1  # cleared away by the next attempt
    convert(str(golden_llama3), tmp_path / "out")
    assert leftovers(tmp_path) == ["out"]


def test_an_existing_destination_is_not_touched(golden_llama3: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        convert(str(golden_llama3), tmp_path)
    assert leftovers(tmp_path) == ["file"]


def test_an_orbax_folder_is_not_converted_again(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Orbax folder already"):
        convert(str(converted), tmp_path / "again")


@pytest.fixture
def spoiled(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "spoiled"))


def test_another_layout_is_refused(spoiled: Path) -> None:
    (spoiled / MARKER_NAME).write_text(json.dumps({"layout": 99}))
    with pytest.raises(ConfigError, match="layout = 99"):
        open_model(str(spoiled))


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_broken_marker_is_refused(spoiled: Path, text: str | None) -> None:
    (spoiled / MARKER_NAME).unlink()
    if text is not None:
        (spoiled / MARKER_NAME).write_text(text)
    with pytest.raises(ConfigError, match=MARKER_NAME):
        open_model(str(spoiled))


@pytest.mark.parametrize("name", ["_METADATA", "embed.weight/.zarray", "embed.weight/0.0"])
def test_a_missing_file_is_named(spoiled: Path, name: str) -> None:
    (spoiled / PARAMS_NAME / name).unlink()
    with pytest.raises(ConfigError, match=f"{name}: bytes = None"):
        open_model(str(spoiled))


def test_a_truncated_file_is_named_with_both_sizes(spoiled: Path) -> None:
    path = spoiled / PARAMS_NAME / "embed.weight" / "0.0"
    raw = path.read_bytes()
    path.write_bytes(raw[:100])
    with pytest.raises(ConfigError, match=f"0.0: bytes = 100: was written with {len(raw)} bytes"):
        open_model(str(spoiled))


def test_a_config_that_does_not_fit_is_refused(spoiled: Path) -> None:
    path = spoiled / "config.json"
    changed = json.loads(path.read_text()) | {"intermediate_size": 128, "num_hidden_layers": 4}
    path.write_text(json.dumps(changed))
    with pytest.raises(ConfigError) as caught:
        load_model(open_model(str(spoiled)))
    message = str(caught.value)
    assert "layers.0.mlp.up.weight = [64, 96]" in message
    assert "[64, 128]" in message
    assert "layers.3.attn.q.weight = 'missing'" in message
