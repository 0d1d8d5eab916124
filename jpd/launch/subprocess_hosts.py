"""Hosts as processes of this machine: started, listened to, ended, never left behind.

A host's log lines are handed on with its name in front. Whatever ends this process also ends its
hosts: they hold the other end of a pipe. A HostLauncher; knows nothing of what a host does.
"""

import os
import signal
import subprocess
import sys
import threading
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable
from typing import IO

from jpd.launch.orders import EVENT_MARK, HostEvent, HostOrders, OnEvent
from jpd.launch.pinning import device_environment
from jpd.log_lines import line_of_host, wants_json
from jpd.rpc.records import dump, load

LINES_KEPT = 20

OnLine = Callable[[str], None]
"""Takes one line of a host's log, on another thread."""


def to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class SubprocessLauncher:
    """Starts one process a host."""

    def __init__(self, on_line: OnLine = to_stderr) -> None:
        self._on_line = on_line

    def start(self, orders: HostOrders, on_event: OnEvent) -> "HostProcess":
        return HostProcess(orders, on_event, self._on_line)

    def close(self) -> None:
        """Processes are ended one by one."""


class HostProcess:
    """One process, from its start; a thread listens to it until it has ended."""

    def __init__(self, orders: HostOrders, on_event: OnEvent, on_line: OnLine) -> None:
        self._name, self._on_event, self._on_line = orders.host, on_event, on_line
        self._last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jpd.launch.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **device_environment(orders.config)},
        )
        assert self._process.stdin is not None
        self._give(self._process.stdin, dump(orders))
        self._threads = [
            threading.Thread(target=listen, name=f"host-{orders.host}", daemon=True)
            for listen in (self._listen, self._read_log)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_seconds: float) -> bool:
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _give(self, stdin: IO[bytes], orders: bytes) -> None:
        """The pipe stays open: its end is how the process learns of ours."""
        try:
            stdin.write(b64encode(orders) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already, which is told as such

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode("utf-8", "replace").rstrip()
            if text.startswith(EVENT_MARK):
                self._on_event(load(b64decode(text.removeprefix(EVENT_MARK)), HostEvent))
            else:
                self._log(text)
        status = self._process.wait()
        self._threads[1].join()
        self._on_event(HostEvent("ended", reason=self._how_it_ended(status)))

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log(line.decode("utf-8", "replace").rstrip())

    def _log(self, text: str) -> None:
        self._last_lines.append(text)
        self._on_line(line_of_host(self._name, text, wants_json()))

    def _how_it_ended(self, status: int) -> str:
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        last = f": {self._last_lines[-1]}" if self._last_lines else ""
        return f"its process ended with status {status}{last}"
