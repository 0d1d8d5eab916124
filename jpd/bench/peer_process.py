"""A peer in a process of its own: it can be given up, and shares no threads with the others.

Nothing but the end of its process breaks off a call into C++. Knows nothing of what is measured.
Called by the benchmark `peers`.
"""

import multiprocessing
import operator
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from jpd.errors import ConfigError, Problem

Make = Callable[[], Any]
"""Makes the peer in its process: a function of a module, or a partial of one."""


class LatePeerError(Exception):
    """There was no answer in time; the process is gone, and the next question starts another."""


class DeadPeerError(Exception):
    """Its process ended by itself, as on a fault in C++; the next question starts another."""

    def __init__(self, name: str, status: int | None) -> None:
        super().__init__(f"{name} ended with status {status}")
        self.status = status


class PeerProcess:
    """A context manager: leaving it ends the process."""

    def __init__(self, name: str, make: Make) -> None:
        self.name, self._make = name, make
        self._process: Any = None
        self._pipe: Connection

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def start(self) -> None:
        """The peer is made meanwhile; a question waits for it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=answer, args=(self._make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, verb: str, arguments: tuple[object, ...], timeout_seconds: float) -> Any:
        """What its method `verb` returns.

        Raises LatePeerError, DeadPeerError, ConfigError, and RuntimeError for what else it raises.
        """
        deadline = time.monotonic() + timeout_seconds
        if self._process is None:
            self.start()
        try:
            self._pipe.send((verb, arguments))
            is_there = self._pipe.poll(max(0.0, deadline - time.monotonic()))
            found, fault = self._pipe.recv() if is_there else (None, None)
        except (EOFError, OSError):
            self._process.join(1.0)
            raise DeadPeerError(self.name, self._end()) from None
        if not is_there:
            self._end()
            raise LatePeerError(f"{self.name}: nothing after {timeout_seconds:.0f} s")
        if isinstance(fault, str):
            raise RuntimeError(f"{self.name}: {fault}")
        if fault is not None:
            raise ConfigError(fault)
        return found

    def _end(self) -> int | None:
        if self._process is None:
            return None
        self._process.terminate()
        self._process.join(1.0)
        self._process.kill()
        self._process.join()
        status: int | None = self._process.exitcode
        self._process = None
        self._pipe.close()
        return status


def answer(make: Make, pipe: Connection) -> None:
    """What runs there: make the peer, then call its methods until nobody asks any more."""
    peer, fault = _attempt(make)
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            verb, arguments = pipe.recv()
            call = partial(operator.methodcaller(verb, *arguments), peer)
            pipe.send(_attempt(call) if fault is None else (None, fault))


def _attempt(call: Callable[[], Any]) -> tuple[Any, Sequence[Problem] | str | None]:
    """What it gives, and what went wrong in a form that can be sent."""
    try:
        return call(), None
    except ConfigError as error:
        return None, error.problems
    except Exception as error:
        return None, repr(error)
