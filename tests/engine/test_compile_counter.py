"""The counter sees compilations, after ready above all, and stops when closed."""

import jax
import numpy as np

from jpd.engine.compile_counter import CompileCounter


def test_counts_only_what_compiles() -> None:
    double = jax.jit(lambda x: x * 2)
    with CompileCounter() as counter:
        double(np.ones(3, np.float32))
        before = counter.num_compilations
        assert before >= 1
        assert counter.num_after_ready == 0
        counter.mark_ready()
        double(np.zeros(3, np.float32))
        assert counter.num_after_ready == 0
        double(np.ones(4, np.float32))
        assert counter.num_after_ready == 1
    double(np.ones(5, np.float32))
    assert counter.num_after_ready == 1


def test_expected_compilations_are_no_fault_but_others_stay_one() -> None:
    triple = jax.jit(lambda x: x * 3)
    with CompileCounter() as counter:
        counter.mark_ready()
        triple(np.ones(3, np.float32))
        with counter.expected():
            triple(np.ones(4, np.float32))
        assert counter.num_after_ready == 1
        triple(np.ones(5, np.float32))
        assert counter.num_after_ready == 2
