"""Ctrl-C and its kin at every moment of a command's life: the right status and no traceback."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from jpd.bench.server_process import ServerProcess
from tests.e2e.conftest import server_environment, write_tiny_mesh

pytestmark = pytest.mark.slow


@contextmanager
def command(*arguments: str, environment: Mapping[str, str]) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "jpd", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def has_loaded(process: "subprocess.Popen[str]", name: str) -> bool:
    """Whether this process has mapped a library of that name: how far its imports are."""
    try:
        return name in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


def test_interrupted_while_it_imports(repo: Path) -> None:
    with command("check", "--model", "x", "--mesh", "y", environment=os.environ) as process:
        eventually(lambda: has_loaded(process, "_multiarray_umath"), 60)  # numpy: long before jax
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == "jpd: interrupted\n" and out == ""


def serve_arguments(repo: Path, model: Path, tmp_path: Path) -> list[str]:
    mesh = write_tiny_mesh(tmp_path)
    arguments = ["--model", str(model), "--mesh", str(mesh), "--http-port", "0"]
    return [*arguments, "--grpc-port", "0", "--drain-seconds", "60"]


def test_interrupted_twice_while_it_compiles(
    repo: Path, golden_llama3: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "JPD_CACHE_DIR": str(tmp_path / "empty")}
    arguments = ["serve", *serve_arguments(repo, golden_llama3, tmp_path)]
    with command(*arguments, environment=environment) as process:
        compiled = tmp_path / "empty" / "xla"
        eventually(lambda: compiled.is_dir() and any(compiled.glob("*-cache")), 120)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err and "jpd: interrupted" in err


def test_interrupted_again_while_it_drains(repo: Path, golden_llama3: Path, tmp_path: Path) -> None:
    """A request whose body does not come would keep it from ending for a minute."""
    arguments, lines = serve_arguments(repo, golden_llama3, tmp_path), list[str]()
    with ServerProcess(arguments, lines.append, server_environment(repo)) as server:
        host, _, port = server.wait_ready(120).http.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: jpd\r\n")
            client.sendall(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
            with urllib.request.urlopen(f"http://{host}:{port}/health") as later:
                assert later.status == 200  # what came before is being served
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: any("draining up to 60 s" in line for line in lines), 30)
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(30) == 130, server.last_words()
        assert "Traceback" not in server.last_words()
        assert "jpd: interrupted" in server.last_words()
