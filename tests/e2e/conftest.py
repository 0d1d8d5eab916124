"""A server as a user starts it: `jpd serve` in a process of its own, on a tiny checkpoint."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jpd.bench.server_process import ServerAddress, ServerProcess

TINY_MESH = """
[[host]]
name = "here"
platform = "cpu"
devices = {num_devices}

[[worker]]
name = "prefill"
role = "prefill"
host = "here"
devices = {prefill}
mesh = {{ tensor = {prefill_tensor} }}

[[worker]]
name = "decode"
role = "decode"
host = "here"
devices = {decode}
mesh = {{ tensor = {decode_tensor} }}
slots = 4

[engine]
max_model_len = 128
prefill_chunk = 32
prefill_buckets = [32]
context_buckets = [128]

[cache]
page_size = 16
pages = 33
"""


def write_tiny_mesh(folder: Path, prefill: int = 1, decode: int = 1) -> Path:
    """A mesh file for 80-token sequences in four slots; `prefill` and `decode` are tensor sizes."""
    path = folder / f"1p1d-tp{prefill}tp{decode}.toml"
    text = TINY_MESH.format(
        num_devices=prefill + decode,
        prefill=list(range(prefill)),
        prefill_tensor=prefill,
        decode=list(range(prefill, prefill + decode)),
        decode_tensor=decode,
    )
    path.write_text(text)
    return path


def server_environment(repo: Path) -> dict[str, str]:
    """A user's environment, with the compilation cache inside the repository."""
    return {**os.environ, "JPD_CACHE_DIR": str(repo / ".cache" / "jpd-tests")}


@dataclass(frozen=True)
class RunningServer:
    process: ServerProcess
    address: ServerAddress

    @property
    def url(self) -> str:
        return self.address.http


@pytest.fixture(scope="session", autouse=True)
def children_can_be_interrupted() -> Iterator[None]:
    """A shell has what it starts in the background ignore SIGINT, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def running_server(
    repo: Path, golden_llama3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """One server for all tests of a module, which leave it as they found it."""
    mesh = write_tiny_mesh(tmp_path_factory.mktemp("e2e"))
    arguments = ["--model", str(golden_llama3), "--mesh", str(mesh)]
    arguments += ["--http-port", "0", "--grpc-port", "0"]
    with ServerProcess(arguments, environment=server_environment(repo)) as process:
        yield RunningServer(process, process.wait_ready(120))
        assert process.process.poll() is None, process.last_words()
