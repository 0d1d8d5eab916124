"""What the command line is given in error: told by argument, value and rule; never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpd.checkpoint.convert import convert
from jpd.cli import main
from jpd.cli_arguments import check_writable

DEEP = "[" * 100_000
PAIR = ["--model", "{golden}", "--mesh", "1p1d-cpu"]
DOORS = ["--http-port", "0", "--grpc-port", "0"]

NUMBERS = [
    ["serve", *PAIR, "--max-calls", "0"],
    ["serve", *PAIR, "--http-port", "65536"],
    ["verify", *PAIR, "--max-tokens", "0"],
    ["verify", *PAIR, "--atol", "nan"],
    ["explore", "--seeds", "0"],
    ["explore", "--processes", "-1"],
    ["workers", "--timeout", "1e300", "list"],
    *(["bench", "serve", f"--{name}", "0"] for name in ("rate", "burstiness", "num-requests")),
    *(["bench", "serve", f"--{name}", "0"] for name in ("probes", "max-len", "vocab-size")),
    *(["bench", "serve", f"--{name}", "0"] for name in ("prompt-tokens", "output-tokens")),
    *(["bench", "serve", f"--{name}", "-1"] for name in ("spread", "ttft-ms", "tpot-ms", "seed")),
    *(["bench", "soak", f"--{name}", "nan"] for name in ("minutes", "kill-seconds")),
]


@pytest.mark.parametrize("arguments", NUMBERS, ids=" ".join)
def test_numbers_out_of_range(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    name = next(word for word in arguments[::-1] if word.startswith("--"))
    assert f"argument {name}: must be " in capsys.readouterr().err


WRONG = [
    (["check", "--model", "x" * 5000, "--mesh", "1p1d-cpu"], 1, "name too long"),
    (["check", "--model", "~nobody/x", "--mesh", "1p1d-cpu"], 2, "~nobody/x"),
    (["check", "--model", "{folder}/deep", "--mesh", "1p1d-cpu"], 2, "config.json"),
    (["check", "--model", "{golden}", "--mesh", "{folder}/deep.toml"], 2, "nested too deeply"),
    (["check", "--model", "{golden}", "--mesh", "x" * 5000], 1, "name too long"),
    (["convert", "{golden}", "{folder}/file/x"], 2, "cannot be written"),
    (["convert", "{golden}", "/proc/x/y"], 2, "cannot be written"),
    (["convert", "{golden}", "{folder}/" + "x" * 300], 2, "name too long"),
    (["convert", "{golden}", "{folder}/loop"], 2, "exists already"),
    (["convert", "{golden}", "{folder}/loop/x"], 2, "cannot be written"),
    (["serve", *PAIR, *DOORS, "--host", "é" * 100], 2, "cannot listen there"),
    (["generate", *PAIR, DEEP], 2, "no tokenizer"),
    (["workers", "--url", "nonsense", "list"], 2, "--url"),
    (["workers", "--url", "http://[::1", "list"], 2, "--url"),
    (["workers", "--url", "http://127.0.0.1:1", "drain", "\udcff"], 2, "--url"),
    (["bench", "router", "--trace", "{folder}/deep/config.json"], 2, "line 1"),
    (["bench", "router", "--json", "{folder}/no/x.json"], 2, "--json"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), WRONG)
def test_what_is_no_input_is_told(
    arguments: list[str],
    status: int,
    words: str,
    golden_llama3: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text(DEEP)
    (tmp_path / "deep.toml").write_text(f"a = {DEEP}")
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    places = {"golden": str(golden_llama3), "folder": str(tmp_path)}
    given = [word.format(**places) if "{" in word else word for word in arguments]
    assert main(given) == status
    err = capsys.readouterr().err
    assert all(line.startswith("jpd: ") for line in err.splitlines()[-1:])
    assert words.lower() in " ".join(err.split()).lower()


FULL = """
import resource, sys
from jpd.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_leaves_no_checkpoint(golden_llama3: Path, tmp_path: Path) -> None:
    """No file may get longer than 4000 bytes, which fails as a full disk does."""
    command = [sys.executable, "-c", FULL, "convert", str(golden_llama3), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"destination = 'out': cannot be written: {os.strerror(27)}" in done.stderr
    assert not list(tmp_path.iterdir())


def test_others_may_read_what_was_converted(golden_llama3: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    made = convert(str(golden_llama3), tmp_path / "out").folder
    assert made.stat().st_mode == (tmp_path / "like").stat().st_mode


def test_looking_whether_a_file_can_be_written_makes_and_changes_none(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("{}")
    for path in (there, tmp_path / "new.json"):
        check_writable(path, "jpd bench", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
    assert there.read_text() == "{}"
