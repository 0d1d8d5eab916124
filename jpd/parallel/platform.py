"""Process-wide JAX set-up: virtual CPU devices and the persistent compilation cache.

Both are settings of the whole process, so only a launcher or a test's conftest calls them.
"""

from pathlib import Path

import jax

from jpd.errors import ConfigError, Problem

CPU_THREADS_PER_DEVICE = 2


def ensure_cpu_devices(num_devices: int) -> None:
    """See to it that this process has at least this many CPU devices, and as many idle ones.

    Must run before the first use of JAX; later it raises ConfigError unless enough devices exist.
    """
    if getattr(jax.config, "jax_num_cpu_devices") >= num_devices:  # noqa: B009 (not in its stubs)
        return
    try:
        # XLA's CPU client has one dispatch thread per virtual device, and a running step occupies
        # one. Without idle ones, page moves starve for as long as both sides are busy: measured
        # with 2 devices, a gather did not start in ten minutes; with 4, within a step.
        jax.config.update("jax_num_cpu_devices", num_devices * CPU_THREADS_PER_DEVICE)
    except RuntimeError as error:  # backends are up already
        present = len(jax.devices("cpu"))
        if present < num_devices:
            rule = f"JAX was already started with {present} CPU devices; launch before using JAX"
            raise ConfigError([Problem("mesh", "host.devices", num_devices, rule)]) from error


def enable_compilation_cache(directory: Path) -> None:
    """Keep compiled executables in `directory`, created when missing, for a quick next start."""
    directory.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
