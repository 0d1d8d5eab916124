"""Spoiled checkpoints through the commands: one error that names file, tensor and both values.

Exit 2, no traceback, and nothing on a device.
"""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpd import cli_serve
from jpd.cli import main
from tests.support.tiny_tokenizer import copy_with_tokenizer, tiny_backend

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_NAME = "model.layers.0.self_attn.q_proj.weight"
COMMANDS = ("check", "serve", "generate", "convert")
Spoil = Callable[[Path], tuple[str, ...]]
"""Changes a good folder; returns what the error must name."""


def with_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def missing_tensor(folder: Path) -> tuple[str, ...]:
    with_tensors(folder, lambda tensors: tensors.pop(Q_NAME))
    return str(folder), Q_NAME, "'missing'", "[64, 64]"


def extra_tensor(folder: Path) -> tuple[str, ...]:
    name = "model.layers.1.self_attn.q_proj.bias"
    with_tensors(folder, lambda tensors: tensors.update({name: np.ones(64, np.float32)}))
    return FILE, name, "[64]", "no such tensor"


def extra_layer(folder: Path) -> tuple[str, ...]:
    name = "model.layers.3.mlp.up_proj.weight"
    with_tensors(folder, lambda tensors: tensors.update({name: np.ones((96, 64), np.float32)}))
    return FILE, name, "[96, 64]", "3 layers"


def wrong_shape(folder: Path) -> tuple[str, ...]:
    with_tensors(folder, lambda t: t.update({Q_NAME: np.ascontiguousarray(t[Q_NAME][:32])}))
    return FILE, Q_NAME, "[32, 64]", "[64, 64]"


def missing_shard(folder: Path) -> tuple[str, ...]:
    """The other shard is there: this is no folder that only has its configuration."""
    names = sorted(load_file(folder / FILE))
    (folder / FILE).rename(folder / "model-1.safetensors")
    weight_map = dict.fromkeys(names, "model-1.safetensors") | {names[0]: "model-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return INDEX, "weight_map", "'model-2.safetensors'", "1 tensors"


def lying_header(folder: Path) -> tuple[str, ...]:
    raw = (folder / FILE).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header[Q_NAME]["shape"] = [64, 65]
    text = json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])
    return FILE, Q_NAME, "need 8320 bytes", "span 8192"


def cut_off(folder: Path) -> tuple[str, ...]:
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[:-100])
    end = len(raw) - 8 - struct.unpack("<Q", raw[:8])[0]
    return FILE, f"data byte {end}", f"holds {end - 100}"


def not_a_number(folder: Path) -> tuple[str, ...]:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[Q_NAME][5, 6] = math.nan

    with_tensors(folder, spoil)
    return FILE, Q_NAME, "1 of 4096 numbers", "NaN"


def large_tokenizer(folder: Path) -> tuple[str, ...]:
    backend = tiny_backend()
    backend.add_tokens(["more", "words"])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder), "tokenizer = 162", "model.embed_tokens.weight", "vocab_size = 160"


def with_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def unknown_architecture(folder: Path) -> tuple[str, ...]:
    with_config(folder, architectures=["MambaForCausalLM"])
    return "config.json", "architectures", "MambaForCausalLM", "LlamaForCausalLM"


def unknown_field(folder: Path) -> tuple[str, ...]:
    with_config(folder, attention_magic=3)
    return "config.json", "attention_magic = 3", "not known"


def wild_default(folder: Path) -> tuple[str, ...]:
    (folder / "generation_config.json").write_text('{"repetition_penalty": -1}')
    return "generation_config.json", "repetition_penalty = -1", "between 0.01 and 100"


KINDS: tuple[Spoil, ...] = (
    missing_tensor,
    extra_tensor,
    extra_layer,
    wrong_shape,
    missing_shard,
    lying_header,
    cut_off,
    not_a_number,
    large_tokenizer,
    unknown_architecture,
    unknown_field,
    wild_default,
)


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that puts or computes anything on a device; logging stays pytest's."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("device memory was taken")

    for name in ("device_put", "make_array_from_single_device_arrays", "jit"):
        monkeypatch.setattr(jax, name, refuse)
    monkeypatch.setattr(cli_serve, "start_logging", lambda as_json: None)


def arguments_of(command: str, folder: Path) -> list[str]:
    pair = ["--model", str(folder), "--mesh", "colocated-cpu"]
    match command:
        case "serve":
            return [command, *pair, "--http-port", "0", "--grpc-port", "0"]
        case "generate":
            return [command, *pair, "[1, 2, 3]"]
        case "convert":
            return [command, str(folder), str(folder.parent / "converted")]
    return [command, *pair]


@pytest.mark.field_report("F01")
@pytest.mark.usefixtures("no_devices")
@pytest.mark.parametrize("spoil", KINDS, ids=lambda spoil: spoil.__name__)
def test_one_error_names_what_is_wrong(
    spoil: Spoil, golden_llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_with_tokenizer(golden_llama3, tmp_path / "model")
    named = spoil(folder)
    for command in COMMANDS:
        is_good = command == "check" and spoil is not_a_number  # it reads no numbers
        assert main(arguments_of(command, folder)) == (0 if is_good else 2), command
        err = capsys.readouterr().err
        errors = [line for line in err.splitlines() if line.startswith("jpd: ")]
        assert len(errors) == (0 if is_good else 1), err
        assert is_good or all(part in errors[0] for part in named), err
        assert "Traceback" not in err
    assert not (tmp_path / "converted").exists()


def test_check_plans_what_was_not_downloaded_yet(
    golden_llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Configuration, index and tokenizer are there, the large files are not."""
    folder = copy_with_tokenizer(golden_llama3, tmp_path / "model")
    missing_shard(folder)
    (folder / "model-1.safetensors").unlink()
    assert main(arguments_of("check", folder)) == 0
    assert "KV pool" in capsys.readouterr().out
