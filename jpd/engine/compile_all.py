"""Compiles executables beside their lowering, for the first call of each to find it made.

Lowering holds the interpreter, compiling does not: one thread lowers, another compiles, and the
workers of a process do so side by side. What is made is kept by JAX for as long as its lowering is:
the calls belong inside the context. Called by the engines before they are ready.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax


@contextlib.contextmanager
def compile_all(
    lowerings: Iterable[jax.stages.Lowered], after_each: Callable[[], None]
) -> Iterator[None]:
    """Blocks until all are compiled. `after_each` is called between executables; what it raises
    ends it as soon as those that are being compiled are ready."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
    kept = []
    try:
        futures = []
        for lowered in lowerings:
            kept.append(lowered)
            futures.append(pool.submit(lowered.compile))
            after_each()
        for future in as_completed(futures):
            future.result()
            after_each()
    finally:
        pool.shutdown(cancel_futures=True)
    yield
