"""Process-wide JAX set-up: virtual CPU devices and the persistent compilation cache.

Both are settings of the whole process, so only a launcher or a test's conftest calls them.
"""

import contextlib
import os
import time
import zlib
from pathlib import Path

import jax

from jpd.errors import ConfigError, Problem

CPU_THREADS_PER_DEVICE = 2

ENTRY_MAGIC_ZLIB = 0x78
CHECKED_MARKER = "checked"  # entries older than this file have been looked at
UNTOUCHED_SECONDS = 60.0
"""A cut-off entry younger than this may be one that another process is writing."""


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
    _drop_cut_off_entries(directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _drop_cut_off_entries(directory: Path) -> None:
    """Remove what a process left that was killed while it kept an executable.

    JAX would warn of such an entry, compile in its place and never replace it: at every start.
    """
    newest, marker = time.time() - UNTOUCHED_SECONDS, directory / CHECKED_MARKER
    with contextlib.suppress(OSError):  # read-only, or gone by now
        oldest = marker.stat().st_mtime if marker.exists() else 0.0
        for entry in directory.glob("*-cache"):
            if oldest <= entry.stat().st_mtime < newest and not _is_whole(entry.read_bytes()):
                entry.unlink(missing_ok=True)
        marker.touch()
        os.utime(marker, (newest, newest))


def _is_whole(entry: bytes) -> bool:
    """Whether the compressed stream has its end; zstd, which we cannot read, only has to be."""
    if not entry or entry[0] != ENTRY_MAGIC_ZLIB:
        return bool(entry)
    reader = zlib.decompressobj()
    try:
        reader.decompress(entry)
    except zlib.error:
        return False
    return reader.eof
