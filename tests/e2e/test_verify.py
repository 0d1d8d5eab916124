"""`jpd verify` and `generate` as commands, in this process: they hold, and they can fail."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpd import cli_verify
from jpd.cli import main
from jpd.cli_against import Exact, report
from jpd.errors import ConfigError
from jpd.transfer.faulty import Fault, FaultyTransfer
from tests.e2e.conftest import write_tiny_mesh

Verify = Callable[..., int]

TENSORS = ((1, 1), (2, 2), (1, 2), (2, 1))


@pytest.fixture
def verify(tmp_path: Path) -> Verify:
    def run(model: Path, *more: str, prefill: int = 1, decode: int = 1) -> int:
        mesh = write_tiny_mesh(tmp_path, prefill, decode)
        return main(["verify", "--model", str(model), "--mesh", str(mesh), *more])

    return run


@pytest.mark.parametrize(("prefill", "decode"), TENSORS)
def test_golden_logits_and_tokens(
    golden: Path, verify: Verify, prefill: int, decode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(golden / "expected.npz")
    assert verify(golden, "--golden", file, prefill=prefill, decode=decode) == 0
    out = capsys.readouterr().out
    assert "golden: max |Δlogit| = " in out
    assert "greedy 96/96" in out


def test_golden_sees_a_changed_weight(
    golden_llama3: Path, tmp_path: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((golden_llama3 / "config.json").read_bytes())
    tensors = {k: np.asarray(v) for k, v in load_file(golden_llama3 / "model.safetensors").items()}
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = -tensors[name]
    save_file(tensors, broken / "model.safetensors")
    assert verify(broken, "--golden", str(golden_llama3 / "expected.npz")) == 1
    out = capsys.readouterr().out
    assert "differs: max |Δlogit| is above --atol" in out
    assert "differs: prompt 1, output token" in out


def test_identical_and_then_not(
    golden_llama3: Path,
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same command sees one KV page that was corrupted in flight."""
    assert verify(golden_llama3, "--max-tokens", "16") == 0
    assert "identical: 9/9" in capsys.readouterr().out
    corrupting = partial(
        cli_verify.launch, transfer_wrapper=lambda inner: FaultyTransfer(inner, [Fault("corrupt")])
    )
    monkeypatch.setattr(cli_verify, "launch", corrupting)
    assert verify(golden_llama3, "--max-tokens", "16") == 1
    out = capsys.readouterr().out
    assert "differs: prompt" in out and "disaggregated" in out
    assert "identical: 9/9" not in out


def test_prompts_of_a_file(
    golden_llama3: Path, tmp_path: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("[3, 4, 5]\n[9]\n")
    assert verify(golden_llama3, "--prompts", str(prompts), "--max-tokens", "4") == 0
    assert "identical: 2/2" in capsys.readouterr().out
    prompts.write_text("this checkpoint has no tokenizer\n")
    assert verify(golden_llama3, "--prompts", str(prompts)) == 2
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.slow
def test_int8_against_float32(
    golden_llama3: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--weights", "int8", "--against", "float32", "--max-tokens", "8")
    assert verify(golden_llama3, *more) == 0
    out = capsys.readouterr().out
    figures = r"int8: max \|Δlogit\| = 0\.\d+, mean 0\.0\d+, greedy \d+/72 against float32"
    assert re.fullmatch(figures, out.strip())


def test_what_is_far_from_float32_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    """One prompt token, two of the continuation; the logits of the last token are of no use."""
    logits = np.eye(3, 4, dtype=np.float32)
    other = logits + np.array([[0, 0, 0, 0], [0, 0, 1.5, 0], [0, 0, 0, 0]], np.float32)
    exact = Exact([[7, 0, 1]], [logits], [2])
    assert report("int8", exact, [other], atol=2.0) == 0
    line = "int8: max |Δlogit| = 1.5, mean 0.125, greedy 1/2 against float32\n"
    assert capsys.readouterr().out == line
    assert report("int8", exact, [other], atol=1.0) == 1
    assert "differs: max |Δlogit| is above --atol 1" in capsys.readouterr().out
    assert report("int8", exact, [other * np.nan], atol=1.0) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "served as float32 already"),
        (("--golden", "x.npz"), "another comparison than --golden"),
    ],
)
def test_nothing_to_compare_is_exit_2(
    golden_llama3: Path,
    verify: Verify,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    assert verify(golden_llama3, "--against", "float32", *more) == 2
    assert message in capsys.readouterr().err


def test_verify_needs_two_roles(golden_llama3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", str(golden_llama3), "--mesh", "colocated-cpu"]) == 2
    assert "needs a prefill and a decode worker" in capsys.readouterr().err


def test_generate_prints_tokens_of_a_model_without_tokenizer(
    golden_llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = np.load(golden_llama3 / "expected.npz")
    prompt = str(expected["prompts"][0].tolist())
    arguments = ["--model", str(golden_llama3), "--mesh", str(write_tiny_mesh(tmp_path))]
    assert main(["generate", *arguments, "--max-tokens", "5", prompt]) == 0
    ids = " ".join(str(token) for token in expected["greedy"][0][:5])
    assert capsys.readouterr().out == f"{prompt} -> {ids}\n"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        (["--max-tokens", "0", "[5]"], "max_tokens"),
        (["--max-tokens", "-1", "[5]"], "max_tokens"),
        (["--temperature", "nan", "[5]"], "temperature"),
        (["--temperature", "-1", "[5]"], "temperature"),
        (["[]"], "prompt"),
        (["[160]"], "prompt"),
        (["[5.5]"], "prompt"),
        (["words"], "prompt"),
        ([str([5] * 200)], "prompt"),
    ],
)
def test_bad_arguments_of_generate_are_exit_2(
    golden_llama3: Path,
    tmp_path: Path,
    more: list[str],
    field: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(golden_llama3), "--mesh", str(write_tiny_mesh(tmp_path))]
    assert main(["generate", *arguments, *more]) == 2
    err = capsys.readouterr().err
    assert field in err.splitlines()[-1] and "loading" not in err


def test_missing_shard_is_exit_2(
    golden_llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((golden_llama3 / "config.json").read_bytes())
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(str(index).replace("'", '"'))
    mesh = write_tiny_mesh(tmp_path)
    assert main(["generate", "--model", str(folder), "--mesh", str(mesh), "[5]"]) == 2
    assert "model-00002-of-00002.safetensors" in capsys.readouterr().err


def test_truncated_gguf_is_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert main(["check", "--model", str(file), "--mesh", "1p1d-cpu"]) == 2
    assert "model.gguf" in capsys.readouterr().err


def test_convert_then_verify_golden(
    golden_llama3: Path, tmp_path: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "orbax"
    assert main(["convert", str(golden_llama3), str(target)]) == 0
    assert verify(target, "--golden", str(golden_llama3 / "expected.npz")) == 0
    assert "greedy 96/96" in capsys.readouterr().out
    assert main(["convert", str(golden_llama3), str(target)]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["text", "npy", "zip", "cut", "none"])
def test_a_golden_file_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    """Whatever numpy makes of it: one line, in our words."""
    path = tmp_path / "expected.npz"
    match content:
        case "text":
            path.write_text("not an archive\n")
        case "npy":
            with path.open("wb") as file:
                np.save(file, np.zeros(3))
        case "zip":
            np.savez(path, prompts=np.zeros((1, 2), np.int32))
        case "cut":
            np.savez(path, prompts=np.zeros((1, 2), np.int32))
            path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ConfigError) as raised:
        cli_verify.read_golden(path)
    (problem,) = raised.value.problems
    assert "must be an npz file with the arrays prompts, logits, greedy, margins" in problem.rule
    assert "pickle" not in problem.rule
