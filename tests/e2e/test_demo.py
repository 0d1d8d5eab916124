"""The demo's program on a tiny checkpoint: its table, its last line, and that it leaves nothing."""

import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from jpd.bench.demo import (
    Answer,
    DemoFailedError,
    check_answers,
    long_prompt,
    phase_table,
    take_event,
)
from tests.e2e.conftest import server_environment, write_tiny_mesh
from tests.support.tiny_tokenizer import copy_with_tokenizer


def start_demo(repo: Path, folder: Path, model: Path) -> subprocess.Popen[str]:
    mesh = write_tiny_mesh(folder)
    text = mesh.read_text().replace("128", "512").replace("pages = 33", "pages = 129")
    mesh.write_text(text)
    command = [sys.executable, "-m", "jpd.bench.demo", "--model", str(model), "--mesh", str(mesh)]
    return subprocess.Popen(
        [*command, "--max-tokens", "6", "--log-days", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=server_environment(repo),
    )


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_demo_answers_five_requests(repo: Path, golden_llama3: Path, tmp_path: Path) -> None:
    model = copy_with_tokenizer(golden_llama3, tmp_path / "tiny")
    with start_demo(repo, tmp_path, model) as demo:
        out, err = demo.communicate(timeout=150)
    assert demo.returncode == 0, f"{out}\n{err}"
    assert re.fullmatch(r"demo ok: 5 requests, \d+ tokens", out.splitlines()[-1])
    for words in ("short 1", "short 4", "long", "transfer", "KV bytes", "server ready"):
        assert words in out


@pytest.mark.slow
def test_interrupted_demo_leaves_no_process(
    repo: Path, golden_llama3: Path, tmp_path: Path
) -> None:
    model = copy_with_tokenizer(golden_llama3, tmp_path / "tiny")
    with start_demo(repo, tmp_path, model) as demo:
        while not (servers := children_of(demo.pid)):
            assert demo.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate(timeout=60)
    assert (demo.returncode, err.splitlines()[-1]) == (130, "demo stopped"), f"{out}\n{err}"
    assert not any(is_running(pid) for pid in servers)


def test_demo_shows_why_the_server_ended(repo: Path, tmp_path: Path) -> None:
    with start_demo(repo, tmp_path, tmp_path) as demo:
        _, err = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "demo failed: jpd serve ended with status 2" in err
    assert "config.json" in err and "Traceback" not in err


def test_events_add_up_and_errors_end_the_demo() -> None:
    answer = Answer("one", "prompt")
    take_event(answer, {"choices": [{"text": "a"}]})
    take_event(answer, {"choices": [{"text": "b", "finish_reason": "stop", "details": {"k": 1}}]})
    take_event(answer, {"choices": [], "usage": {"completion_tokens": 2}})
    assert (answer.text, answer.finish_reason) == ("ab", "stop")
    assert (answer.usage, answer.details) == ({"completion_tokens": 2}, {"k": 1})
    with pytest.raises(DemoFailedError, match="no KV moved"):
        check_answers([answer])
    answer.details["kv_bytes"] = 9
    assert check_answers([answer, answer]) == 4
    with pytest.raises(DemoFailedError, match="worker lost"):
        take_event(answer, {"error": {"message": "worker lost"}})


def test_table_fits_a_narrow_terminal() -> None:
    names = ("queue", "prefill", "transfer", "decode", "ttft", "tpot")
    answer = Answer("short 1", "prompt", usage={"prompt_tokens": 1538, "completion_tokens": 48})
    answer.details = {f"{name}_seconds": 17.4321 for name in names} | {"kv_bytes": 57_802_752}
    console = Console(width=80, file=io.StringIO())
    console.print(phase_table([answer]))
    shown = console.file.getvalue()
    assert "…" not in shown and "57,802,752" in shown and shown.count("17,432") == 6


def test_long_prompt_is_long() -> None:
    assert 1000 < len(long_prompt(46).split()) < 1500
