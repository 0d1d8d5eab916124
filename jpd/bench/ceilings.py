"""What one device reaches at best, measured: a matrix product, and a pass over memory.

Memory is a copy or a sum of an array that no cache holds, whichever is faster. `measure_apart` does
it in a process of its own, so that a benchmark whose servers are processes starts no JAX itself.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from jpd.bench.results import Result
from jpd.errors import ConfigError, Problem

PRODUCT_SIDE = 2048
ARRAY_BYTES = 1 << 28
NUM_RUNS = 5
TIMEOUT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one device; on a CPU that is all the cores that the process may use."""

    device: str
    flops_per_second: float
    bytes_per_second: float

    def results(self) -> list[Result]:
        return [
            Result(f"ceiling of {self.device}: product", self.flops_per_second / 1e9, "GFLOP/s"),
            Result(f"ceiling of {self.device}: memory", self.bytes_per_second / 1e9, "GB/s"),
        ]


def measure(dtype: str = "float32") -> Ceilings:
    """On the first device of this process; takes some seconds."""
    side = jnp.full((PRODUCT_SIDE, PRODUCT_SIDE), 1e-3, dtype)
    array = jnp.ones(ARRAY_BYTES // 4, jnp.float32)
    product, copied, summed = jax.jit(jnp.matmul), jax.jit(jnp.copy), jax.jit(jnp.sum)
    return Ceilings(
        jax.devices()[0].device_kind,
        2.0 * PRODUCT_SIDE**3 / _best_seconds(lambda: product(side, side)),
        max(
            2.0 * ARRAY_BYTES / _best_seconds(lambda: copied(array)),
            1.0 * ARRAY_BYTES / _best_seconds(lambda: summed(array)),
        ),
    )


def measure_apart(dtype: str = "float32") -> Ceilings:
    """In a process that ends before anything else is measured. Raises ConfigError."""
    command = [sys.executable, "-m", "jpd.bench.ceilings", dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        rule = f"could not be measured: {done.stderr.strip()[-500:]}"
        raise ConfigError([Problem("jpd bench", "ceilings", dtype, rule)])
    return Ceilings(**json.loads(done.stdout))


def _best_seconds(dispatch: Callable[[], jax.Array]) -> float:
    """A ceiling is the best of several runs; the first compiles."""
    dispatch().block_until_ready()
    seconds = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        dispatch().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1]))))
