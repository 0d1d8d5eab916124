"""Counts XLA compilations in this process, to prove that none happens after ready.

One per server, made before warm-up. Reading a cached executable from disk counts too: it stalls a
step as well.
"""

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

import jax.monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """A listener of JAX's compile events, until it is closed. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._count_at_ready: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self._count += 1

    @property
    def num_compilations(self) -> int:
        return self._count

    @property
    def num_after_ready(self) -> int:
        """0 until `mark_ready`."""
        with self._lock:
            return 0 if self._count_at_ready is None else self._count - self._count_at_ready

    def mark_ready(self) -> None:
        """From now on every compilation is a fault."""
        with self._lock:
            self._count_at_ready = self._count

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """What is compiled inside is no fault: a check that is compiled when it is asked for."""
        before = self._count
        try:
            yield
        finally:
            with self._lock:
                if self._count_at_ready is not None:
                    self._count_at_ready += self._count - before

    def close(self) -> None:
        """Stop listening. Once only."""
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def __enter__(self) -> "CompileCounter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
