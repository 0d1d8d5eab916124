"""Host memory of converting and loading: about one tensor, whatever the size of the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.loading import write_tensors

NUM_LAYERS, EMBED_DIM, MLP_DIM, VOCAB_SIZE = 16, 512, 4096, 512
TENSOR_MIB = EMBED_DIM * MLP_DIM * 4 / 2**20

# A thread samples the memory that no file backs: pages of mapped checkpoint files are not counted.
PROGRAM = """
import os, sys, threading, time
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from jpd.checkpoint.convert import convert
from jpd.checkpoint.load import load_params
from jpd.checkpoint.model_source import open_model
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh

def anonymous_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))

def watch():
    while True:
        peaks.append(anonymous_mib())
        time.sleep(0.002)

jax.devices()
peaks = [anonymous_mib()]
base = peaks[0]
threading.Thread(target=watch, daemon=True).start()
source, destination, what = sys.argv[1:]
if what == "convert":
    convert(source, destination)
else:
    model = open_model(source)
    mesh = make_worker_mesh(jax.devices(), tensor=1, expert=1, num_cached_heads=4)
    abstract = abstract_params(model.config, jnp.bfloat16)
    load_params(model.require_source(), model.config, abstract, [mesh], jnp.bfloat16)
    base += 2 * abstract.num_params / 2**20  # on a CPU the device's memory is the host's
print(max(peaks) - base)
"""


@pytest.fixture(scope="module")
def large_checkpoint(golden_llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of about 450 MiB, most of it in tensors of 8 MiB."""
    folder = tmp_path_factory.mktemp("large")
    config = json.loads((golden_llama3 / "config.json").read_text()) | {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": EMBED_DIM,
        "intermediate_size": MLP_DIM,
        "vocab_size": VOCAB_SIZE,
        "num_key_value_heads": 4,
        "head_dim": EMBED_DIM // 4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    square, up = (EMBED_DIM, EMBED_DIM), (MLP_DIM, EMBED_DIM)
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, EMBED_DIM), "model.norm.weight": square[:1]}
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{letter}_proj.weight": square for letter in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": up for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = up[::-1]
        shapes[f"{name}.input_layernorm.weight"] = square[:1]
        shapes[f"{name}.post_attention_layernorm.weight"] = square[:1]
    rng = np.random.default_rng(0)
    tensors = {name: rng.random(shape, np.float32) for name, shape in shapes.items()}
    write_tensors(folder, tensors)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["convert", "load"])
def test_memory_is_that_of_a_few_tensors(large_checkpoint: Path, tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(large_checkpoint), str(tmp_path / "out"), what]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    used_mib = float(done.stdout)
    total_mib = (large_checkpoint / "model.safetensors").stat().st_size / 2**20
    print(f"{what}: {used_mib:.0f} MiB for a checkpoint of {total_mib:.0f} MiB")
    assert total_mib > 400
    assert used_mib < 100
