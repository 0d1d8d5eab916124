"""What each command of the README and each example takes: time, and memory of all its processes.

Runs them one after another where it stands, which must be a fresh clone, and writes
docs/benchmarks/commands.json:  python3 -m tests.support.command_costs  (needs Linux and make)
Examples that need a server share one. Nothing else should run on the machine meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

JPD, PYTHON = ".venv/bin/jpd", ".venv/bin/python"
MODEL_AND_MESH = ["--model", "models/gemma-3-270m.toml", "--mesh", "mesh_configs/1p1d-cpu.toml"]
HTTP, GRPC = 8000, 8001
MAKE = [["make", "demo"], ["make", "check"], ["make", "test-fast"], ["make", "test"]]
COMMANDS = [
    [JPD, "check", *MODEL_AND_MESH],
    [JPD, "generate", *MODEL_AND_MESH, "--max-tokens", "16", "Once upon a time"],
    [JPD, "verify", *MODEL_AND_MESH],
    [JPD, "convert", "models/gemma-3-270m.toml", ".cache/gemma-3-270m"],
    [JPD, "explore", "--seeds", "1000"],
    *(
        [PYTHON, f"examples/{name}.py", *MODEL_AND_MESH]
        for name in ("python_api", "chat_session", "guided_json", "logprobs")
    ),
]
CLIENTS = ["openai_client", "grpc_client", "grpc_chat"]
"""examples/tools.py is left out: its model is on no package index."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLE_SECONDS = 0.2
READY_SECONDS = 600.0


class Memory(threading.Thread):
    """The most that a process and all its descendants had resident at once, sampled."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root, self._over, self.peak_bytes = root, threading.Event(), 0

    def run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, sum(map(resident_bytes, family(self._root))))

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.peak_bytes


def family(root: int) -> list[int]:
    """A process and its descendants."""
    found, todo = list[int](), [root]
    while todo:
        process = todo.pop()
        found.append(process)
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            try:
                todo += map(int, task.read_text().split())
            except OSError:
                continue  # it has ended
    return found


def resident_bytes(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def cost_of(command: Sequence[str]) -> list[dict[str, object]]:
    """Runs it. Raises CalledProcessError when it fails."""
    name = " ".join(Path(part).name if part in (JPD, PYTHON) else part for part in command)
    print(f"{name} ...", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    memory = Memory(process.pid)
    memory.start()
    status = process.wait()
    seconds, peak_bytes = time.monotonic() - start, memory.stop()
    if status:
        raise subprocess.CalledProcessError(status, list(command))
    return results(name, seconds, peak_bytes)


def results(name: str, seconds: float, peak_bytes: int) -> list[dict[str, object]]:
    def result(what: str, value: float, unit: str) -> dict[str, object]:
        return {"name": f"{name}: {what}", "value": value, "unit": unit, "target": None, "ok": True}

    memory = result("peak memory", round(peak_bytes / 2**30, 2), "GiB")
    return [result("took", round(seconds, 1), "s"), memory]


@contextmanager
def serving() -> Iterator[list[dict[str, object]]]:
    """A server for the clients; its own results are in the list once it has ended."""
    ports = ["--http-port", str(HTTP), "--grpc-port", str(GRPC)]
    found: list[dict[str, object]] = []
    start = time.monotonic()
    process = subprocess.Popen([JPD, "serve", *MODEL_AND_MESH, *ports], stdout=subprocess.DEVNULL)
    memory = Memory(process.pid)
    memory.start()
    try:
        wait_ready(process)
        seconds = time.monotonic() - start
        yield found
        found += results("jpd serve, until it is ready", seconds, memory.stop())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_ready(process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{HTTP}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"jpd serve is not ready after {READY_SECONDS:g} s")


def client(name: str) -> list[str]:
    address = f"127.0.0.1:{GRPC}" if name.startswith("grpc") else f"http://127.0.0.1:{HTTP}"
    return [PYTHON, f"examples/{name}.py", address]


def main() -> None:
    start, found = time.monotonic(), list[dict[str, object]]()
    for command in [*MAKE, *COMMANDS]:
        found += cost_of(command)
    with serving() as of_server:
        for name in CLIENTS:
            found += cost_of(client(name))
    document = {**facts(), "seconds": round(time.monotonic() - start, 1)}
    document["results"] = [*found, *of_server]
    Path("docs/benchmarks/commands.json").write_text(json.dumps(document, indent=2) + "\n")


def facts() -> dict[str, object]:
    """Machine and versions, as jpd's own benchmarks tell them."""
    code = "import json; from jpd.bench.results import machine; print(json.dumps(machine()))"
    told = json.loads(subprocess.run([PYTHON, "-c", code], capture_output=True, check=True).stdout)
    return {**told, "command": f"python3 -m {__spec__.name}"}


if __name__ == "__main__":
    sys.exit(main())
