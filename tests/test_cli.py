"""The command line's borders: exit codes, messages, and what `check` prints without any device."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jpd import cli_generate, cli_serve, cli_verify
from jpd.checkpoint.model_source import Model
from jpd.cli import build_parser, main
from jpd.cli_verify import compare_greedy, first_difference, read_golden, read_prompts
from jpd.errors import ConfigError, RequestError, WorkerError


def run_jpd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jpd", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def test_check_needs_no_backend(repo: Path, golden_llama3: Path) -> None:
    """With a platform that does not exist any use of a device would fail."""
    mesh = str(repo / "mesh_configs" / "1p1d-tp1tp2-cpu.toml")
    done = run_jpd("check", "--model", str(golden_llama3), "--mesh", mesh, JAX_PLATFORMS="nothing")
    assert done.returncode == 0, done.stderr
    assert "prefill-0 -> decode-0" in done.stdout
    assert "resharded on the devices" in done.stdout
    assert "Buckets to be compiled" in done.stdout


def test_check_tells_what_layer_groups_multiply(
    repo: Path, golden_llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three layers: two groups are one of two layers, and one of one."""
    text = (repo / "mesh_configs" / "1p1d-tp1tp2-cpu.toml").read_text()
    mesh = tmp_path / "mesh.toml"
    for groups, status in ((2, 0), (4, 2)):
        mesh.write_text(text.replace("[engine]\n", f"[engine]\nlayer_groups = {groups}\n"))
        assert main(["check", "--model", str(golden_llama3), "--mesh", str(mesh)]) == status
    printed = capsys.readouterr()
    told = " ".join(printed.out.split())
    assert "layer groups of a chunk: 2 of 2 + 1 layers, KV pieces x 2, " in told
    assert "executables of the model x 2 and two more for each chunk, " in told
    assert "executables that move pages x 2" in told
    assert "engine.layer_groups" in printed.err
    assert "must be between 1 and the model's 3 layers" in " ".join(printed.err.split())


def test_check_of_a_big_model_on_machines_that_are_not_here(
    repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, mesh = repo / "models" / "llama-3.1-70b.toml", "2p1d-tp8-h200"
    assert main(["check", "--model", str(model), "--mesh", mesh]) == 0
    out = capsys.readouterr().out
    assert "70,553,706,496 parameters" in out
    assert "327,680 bytes per token" in out
    for link in ("NVLink", "PCIe", "RDMA"):
        assert link in out


def test_check_tells_every_problem_of_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = tmp_path / "mesh.toml"
    mesh.write_text('[[host]]\nname = "a"\nplatform = "cpu"\ndevices = 1\nslot = 3\n')
    assert main(["check", "--model", str(tmp_path / "no-model"), "--mesh", str(mesh)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 4  # unknown key, no prefill, no decode, no model
    assert all(line.startswith("jpd: ") for line in lines)
    assert any("no-model" in line for line in lines)
    assert any("host[0].slot" in line for line in lines)


def test_check_names_the_tensor_axis_that_does_not_divide(
    repo: Path, tmp_path: Path, golden_llama3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (repo / "mesh_configs" / "1p1d-tp2-cpu.toml").read_text()
    text = text.replace("devices = 4", "devices = 6").replace("[2, 3]", "[2, 3, 4]")
    mesh = tmp_path / "tp3.toml"
    mesh.write_text(text.replace("tensor = 2 }\nslots", "tensor = 3 }\nslots"))
    assert main(["check", "--model", str(golden_llama3), "--mesh", str(mesh)]) == 2
    err = capsys.readouterr().err
    assert "worker.decode-0.mesh.tensor = 3: does not divide num_heads = 4" in err


def test_help_is_on_one_screen_and_completions_can_be_read_by_the_shell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = build_parser().format_help()
    assert len(shown.splitlines()) <= 32
    assert "130 interrupted" in shown
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--print-completion", "bash"])
    assert ended.value.code == 0
    script = capsys.readouterr().out
    assert "--timeline" in script and "explore" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=20)


@pytest.mark.parametrize("command", ["check", "serve", "generate", "verify", "convert", "bench"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    assert "usage: jpd" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["sing"], ["check"], ["check", "--model", "x"]])
def test_wrong_usage_is_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: jpd" in capsys.readouterr().err


def test_no_traceback_when_the_reader_goes_away(repo: Path, golden_llama3: Path) -> None:
    command = f"{sys.executable} -m jpd check --model {golden_llama3} --mesh 1p1d-cpu | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=repo, timeout=60)
    assert "Traceback" not in done.stderr


RECOMMENDED = {"temperature": 0.6, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("module", "arguments", "given"),
    [
        (cli_serve, ["--http-port", "0", "--grpc-port", "0"], RECOMMENDED),
        (cli_serve, ["--http-port", "0", "--grpc-port", "0", "--generation-config", "off"], {}),
        (cli_generate, ["[1]"], RECOMMENDED),
        (cli_generate, ["[1]", "--generation-config", "off"], {}),
        (cli_verify, [], {}),  # greedy is greedy
    ],
)
def test_only_who_answers_people_takes_what_the_models_authors_recommend(
    module: ModuleType,
    arguments: list[str],
    given: dict[str, float],
    golden_llama3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli_serve, "start_logging", lambda as_json: None)
    shutil.copytree(golden_llama3, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    seen = []

    def launch(model: Model, *_: object, **__: object) -> None:
        seen.append(model.generation.given())
        raise WorkerError("prefill-0", "nothing starts here")

    monkeypatch.setattr(module, "launch", launch)
    command = module.__name__.rpartition("_")[2]
    pair = ["--model", str(tmp_path), "--mesh", "1p1d-cpu"]
    assert main([command, *pair, *arguments]) == 1
    assert seen == [given]


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1], []) == 0


def test_greedy_may_differ_only_at_a_near_tie() -> None:
    expected = np.array([4, 5, 6])
    clear, tie = np.array([1.0, 1.0, 1.0]), np.array([1.0, 1e-4, 1.0])
    assert compare_greedy([4, 5, 6], expected, clear) == (3, None)
    assert compare_greedy([4, 9, 6], expected, clear) == (1, 1)
    assert compare_greedy([4, 9, 9], expected, tie) == (1, None)
    assert compare_greedy([4], expected, tie) == (1, 1)  # an early end is never a tie


def test_prompts_file_holds_texts_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("once upon a time\n\n[1, 2, 3]\n[not ids\n")
    assert read_prompts(path) == ["once upon a time", [1, 2, 3], "[not ids"]
    path.write_text("\n")
    for file in (path, tmp_path / "absent"):
        with pytest.raises(ConfigError):
            read_prompts(file)
    path.write_text("[1, 2.5]\n")
    with pytest.raises(RequestError, match="token ids only"):
        read_prompts(path)


def test_golden_file_must_hold_the_arrays(tmp_path: Path, golden_llama3: Path) -> None:
    golden = read_golden(golden_llama3 / "expected.npz")
    assert golden.greedy.shape == golden.margins.shape == (len(golden.prompts), 32)
    text = tmp_path / "text.npz"
    text.write_text("not an npz")
    partly = tmp_path / "part.npz"
    np.savez(partly, prompts=golden.prompts)
    uneven = tmp_path / "uneven.npz"
    arrays = {name: getattr(golden, name) for name in ("prompts", "logits", "greedy", "margins")}
    np.savez(uneven, **{**arrays, "logits": golden.logits[:1]})
    for path in (text, partly, uneven, tmp_path / "absent.npz"):
        with pytest.raises(ConfigError):
            read_golden(path)


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "soon"])
def test_drain_seconds_is_a_finite_time(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--model", "m", "--mesh", "f", "--drain-seconds", value])
    assert stop.value.code == 2
    assert "--drain-seconds" in capsys.readouterr().err


def test_two_doors_on_one_port_are_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = ["serve", "--model", "m", "--mesh", "f", "--http-port", port, "--grpc-port", port]
    assert main(arguments) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
