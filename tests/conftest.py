"""The test bed: eight virtual CPU devices, strict dtype promotion, a lasting compilation cache.

Everything about JAX is set here, before any test module can start a backend.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jpd.log_lines import JsonLines, PlainLines

REPO = Path(__file__).resolve().parent.parent
GOLDEN = REPO / "tests" / "golden"
XLA_CACHE = REPO / ".cache" / "xla-tests"
NUM_DEVICES = 8


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JPD_CACHE_DIR", str(REPO / ".cache" / "jpd-tests"))
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_compilation_cache_dir", str(XLA_CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any("gpu" in device.platform for device in jax.devices()):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def no_log_outlives_its_test() -> Iterator[None]:
    """A command that ran in this process logs to what was its stderr, which is closed then."""
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, PlainLines | JsonLines):
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def repo() -> Path:
    return REPO


@pytest.fixture(scope="session")
def golden_gemma3() -> Path:
    """A tiny random Gemma 3 (one KV head, sliding window 16) with what `transformers` computed."""
    return GOLDEN / "gemma3"


@pytest.fixture(scope="session")
def golden_llama3() -> Path:
    """A tiny random Llama 3 (two KV heads, tied embeddings) with what `transformers` computed."""
    return GOLDEN / "llama3"


@pytest.fixture(scope="session", params=["gemma3", "llama3"])
def golden(request: pytest.FixtureRequest) -> Path:
    """Each golden checkpoint in turn."""
    return GOLDEN / str(request.param)
