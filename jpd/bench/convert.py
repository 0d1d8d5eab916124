"""Host memory of converting and loading: a few tensors, whatever the size of the checkpoint.

1. A Llama in float32 is made up, a file per layer and an index, its embeddings the largest tensor.
2. A process of its own converts it, another one loads it; each tells how far its memory grew.
Called by `jpd bench convert` and by the tests of `jpd.checkpoint`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jpd.bench import memory_child
from jpd.bench.results import Result
from jpd.checkpoint.safetensors_source import INDEX_NAME
from jpd.errors import ConfigError, Problem

TARGET_TENSORS = 3.0
"""Memory in tensors of the largest size: as read, as written, and half of one for all else."""

TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the made-up Llama."""

    num_layers: int = 8
    embed_dim: int = 768
    mlp_dim: int = 3072
    vocab_size: int = 24_576

    @property
    def largest_bytes(self) -> int:
        return 4 * self.embed_dim * max(self.vocab_size, self.mlp_dim)


FULL, QUICK = Shape(), Shape(num_layers=2)


def run(*, is_quick: bool = False) -> list[Result]:
    """Raises ConfigError where memory cannot be measured."""
    if sys.platform != "linux":
        rule = "reads /proc, which only Linux has"
        raise ConfigError([Problem("jpd bench", "convert", sys.platform, rule)])
    shape = QUICK if is_quick else FULL
    with tempfile.TemporaryDirectory(prefix="jpd-bench-") as parent:
        source = Path(parent) / "source"
        num_bytes = write_checkpoint(source, shape)
        results = [Result("checkpoint", num_bytes / 2**20, "MiB")]
        results.append(Result("its largest tensor", shape.largest_bytes / 2**20, "MiB"))
        for what in ("convert", "load"):
            start = time.perf_counter()
            grown = memory_growth(source, Path(parent) / "orbax", what)
            seconds = time.perf_counter() - start
            tensors = grown / shape.largest_bytes
            name = f"{what}: memory above its start"
            results += [
                Result(name, grown / 2**20, "MiB"),
                Result(f"{name}, in largest tensors", tensors, "tensors", TARGET_TENSORS),
                Result(f"{what}: with the start of its process", seconds, "s"),
            ]
    return results


def memory_growth(source: Path, destination: Path, what: str) -> int:
    """Bytes, of a process that does it."""
    command = [sys.executable, "-m", memory_child.__name__, str(source), str(destination), what]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=TIMEOUT_SECONDS
    )
    return int(done.stdout)


def write_checkpoint(folder: Path, shape: Shape) -> int:
    """Layer by layer. Returns how many bytes of tensors it holds."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    rng = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for index, shapes in enumerate(_files(shape)):
        file = f"model-{index + 1:05}.safetensors"
        tensors = {name: rng.random(size, np.float32) for name, size in shapes.items()}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
        num_bytes += sum(values.nbytes for values in tensors.values())
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return num_bytes


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.embed_dim,
        "intermediate_size": shape.mlp_dim,
        "vocab_size": shape.vocab_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def _files(shape: Shape) -> list[dict[str, tuple[int, ...]]]:
    """Tensors and their shapes by file: what is outside the layers, then each layer."""
    embed, mlp = shape.embed_dim, shape.mlp_dim
    files: list[dict[str, tuple[int, ...]]] = [
        {"model.embed_tokens.weight": (shape.vocab_size, embed), "model.norm.weight": (embed,)}
    ]
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}"
        sizes: dict[str, tuple[int, ...]] = {
            f"{name}.self_attn.{letter}_proj.weight": (embed, embed) for letter in "qkvo"
        }
        sizes |= {f"{name}.mlp.{part}_proj.weight": (mlp, embed) for part in ("gate", "up")}
        sizes[f"{name}.mlp.down_proj.weight"] = (embed, mlp)
        sizes[f"{name}.input_layernorm.weight"] = (embed,)
        sizes[f"{name}.post_attention_layernorm.weight"] = (embed,)
        files.append(sizes)
    return files
