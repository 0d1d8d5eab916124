"""`jpd serve` as a child process: started, awaited, and ended without leaving anything behind.

Knows the ready line and nothing else of the server. Used by the demo and the end-to-end tests.
"""

import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO

READY = re.compile(r"jpd ready: (?P<http>http://\S+) grpc (?P<grpc>\S+) model (?P<model>\S+)")
STDERR_LINES_KEPT = 200
STOP_SECONDS = 30.0


class ServerFailedError(Exception):
    """The server ended by itself or was not ready in time; its last words are the message."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """What the ready line says."""

    http: str
    grpc: str
    model: str
    start_seconds: float


class ServerProcess:
    """A context manager: leaving it ends the server, first by SIGINT, after a while by SIGKILL."""

    def __init__(
        self,
        arguments: Sequence[str],
        on_line: Callable[[str], None] = lambda line: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`arguments` of `jpd serve`; `on_line` gets each line of its stderr, on another thread."""
        self._arguments = arguments
        self._on_line = on_line
        self._environment = environment
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        self._ready = threading.Event()
        self._address: re.Match[str] | None = None
        self._start_time = time.monotonic()

    def __enter__(self) -> "ServerProcess":
        # In a process group of its own: a Ctrl-C at the terminal reaches us, and we end the server.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jpd", "serve", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
            env=self._environment,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        readers = ((self.process.stdout, self._read_out), (self.process.stderr, self._read_err))
        self._threads = [
            threading.Thread(target=read, args=(stream,), daemon=True) for stream, read in readers
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout_seconds: float) -> ServerAddress:
        """Block until the ready line. Raises ServerFailedError."""
        deadline = time.monotonic() + timeout_seconds
        while not self._ready.wait(0.05):
            if self.process.poll() is not None:
                raise ServerFailedError(self.last_words())
            if time.monotonic() > deadline:
                raise ServerFailedError(f"not ready after {timeout_seconds:.0f} s")
        assert self._address is not None
        seconds = time.monotonic() - self._start_time
        found = self._address
        return ServerAddress(found["http"], found["grpc"], found["model"], seconds)

    def stop(self) -> int:
        """End the server and wait for it; its exit status. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            status = self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        except BaseException:  # a second Ctrl-C: no more patience, but nothing is left behind
            self.process.kill()
            self.process.wait()
            raise
        for thread in self._threads:
            thread.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return status

    def last_words(self) -> str:
        """The exit status and the end of stderr."""
        status = self.process.poll()
        if status is not None:
            for thread in self._threads:
                thread.join()
        ended = "is still running" if status is None else f"ended with status {status}"
        return "\n".join((f"jpd serve {ended}; its stderr:", *self._stderr))

    def _read_out(self, stream: IO[str]) -> None:
        for line in stream:
            found = READY.search(line)
            if found:
                self._address = found
                self._ready.set()

    def _read_err(self, stream: IO[str]) -> None:
        for line in stream:
            self._stderr.append(line.rstrip())
            self._on_line(line.rstrip())
