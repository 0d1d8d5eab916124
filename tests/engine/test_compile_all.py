"""Executables made at once are there for the first calls, and a stop is heard between them."""

import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpd.engine.compile_all import compile_all
from jpd.engine.compile_counter import CompileCounter

SIZES = (3, 5, 7, 9)
INPUTS = {size: np.arange(size, dtype=np.float32) for size in SIZES}


def test_g03_the_first_calls_find_everything_compiled() -> None:
    function = jax.jit(lambda x: jnp.sum(x * 3.0))
    seen = []
    with CompileCounter() as counter:
        with compile_all((function.lower(INPUTS[size]) for size in SIZES), lambda: seen.append(1)):
            assert counter.num_compilations == len(SIZES)
            assert len(seen) == 2 * len(SIZES), "after each is lowered and after each is compiled"
            found = [float(function(INPUTS[size])) for size in SIZES]
        assert counter.num_compilations == len(SIZES)
    assert found == [3.0 * sum(range(size)) for size in SIZES]


def test_a_stop_ends_it_before_the_next_one_is_lowered() -> None:
    function, num_lowered = jax.jit(lambda x: jnp.sum(x * 5.0)), 0

    def lowerings() -> Iterator[jax.stages.Lowered]:
        nonlocal num_lowered
        for size in SIZES:
            num_lowered += 1
            yield function.lower(INPUTS[size])

    def stop() -> None:
        raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"), compile_all(lowerings(), stop):
        pytest.fail("nothing runs after a stop")
    assert num_lowered == 1
    assert not any(one.name.startswith("compile_") for one in threading.enumerate())
