"""Process-wide set-up: what a killed process left in the compilation cache."""

import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jpd.parallel.platform import enable_compilation_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
WHOLE = zlib.compress(bytes(range(256)) * 100)


@pytest.fixture(autouse=True)
def settings_are_put_back() -> Iterator[None]:
    before = {name: jax.config.values[name] for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def keep(folder: Path, name: str, data: bytes, age_seconds: float = 3600.0) -> Path:
    path = folder / f"{name}-cache"
    path.write_bytes(data)
    written = time.time() - age_seconds
    os.utime(path, (written, written))
    return path


@pytest.mark.parametrize("data", [b"", WHOLE[:1], WHOLE[:-1], WHOLE[:20] + b"\0" * 20])
def test_an_entry_cut_off_by_a_kill_is_removed_so_that_it_is_made_again(
    tmp_path: Path, data: bytes
) -> None:
    broken = keep(tmp_path, "jit_step", data)
    enable_compilation_cache(tmp_path)
    assert not broken.exists()


def test_whole_entries_and_entries_being_written_stay(tmp_path: Path) -> None:
    paths = [
        keep(tmp_path, "zlib", WHOLE),
        keep(tmp_path, "zstd", b"\x28\xb5\x2f\xfd rest"),
        keep(tmp_path, "young", b"", age_seconds=0.0),
        tmp_path / "notes.txt",
    ]
    paths[-1].touch()
    enable_compilation_cache(tmp_path)
    assert all(path.exists() for path in paths)


def test_an_entry_is_looked_at_once(tmp_path: Path) -> None:
    enable_compilation_cache(tmp_path)
    seen_before = keep(tmp_path, "seen_before", b"")
    cut_off_since = keep(tmp_path, "cut_off_since", b"", age_seconds=61.0)
    os.utime(tmp_path / "checked", (time.time() - 120.0,) * 2)
    enable_compilation_cache(tmp_path)
    assert seen_before.exists() and not cut_off_since.exists()
