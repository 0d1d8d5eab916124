"""A process that converts or loads a checkpoint and prints by how much its memory grew, in bytes.

    python -m jpd.bench.memory_child SRC DST convert|load

A thread samples the memory that no file backs: pages of the mapped checkpoint are not counted, the
system takes them back when it needs room. Started by `jpd.bench.convert`.
"""

import sys
import threading
import time

import jax
import jax.numpy as jnp

from jpd.checkpoint.convert import convert
from jpd.checkpoint.load import load_params, params_bytes
from jpd.checkpoint.model_source import open_model
from jpd.nn.params import abstract_params
from jpd.parallel.mesh import make_worker_mesh

SAMPLE_SECONDS = 0.002


def main(source: str, destination: str, what: str) -> None:
    jax.devices()
    base = anonymous_bytes()
    peaks = [base]
    threading.Thread(target=_watch, args=(peaks,), daemon=True).start()
    if what == "convert":
        convert(source, destination)
    else:
        base += _load(source)
    print(max(*peaks, anonymous_bytes()) - base)


def anonymous_bytes() -> int:
    """Of this process, on Linux."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def _watch(peaks: list[int]) -> None:
    while True:
        peaks[0] = max(peaks[0], anonymous_bytes())
        time.sleep(SAMPLE_SECONDS)


def _load(source: str) -> int:
    """As bfloat16 on one CPU device, whose memory is the host's. Returns what it holds."""
    model = open_model(source)
    heads = model.config.num_cached_heads
    mesh = make_worker_mesh(jax.devices()[:1], tensor=1, expert=1, num_cached_heads=heads)
    abstract = abstract_params(model.config, jnp.bfloat16)
    load_params(model.require_source(), model.config, abstract, [mesh], jnp.bfloat16)
    return params_bytes(abstract)


if __name__ == "__main__":
    main(*sys.argv[1:])
