"""Pages with figures: they are what the files of results say, and nothing else."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from jpd.bench import publish, run_all
from jpd.bench.results import Result, processor, write_json
from jpd.cli_bench import sigterm_as_interrupt
from jpd.errors import ConfigError

RESULTS = {
    "engine": [
        Result("decode step, batch 1, 512 tokens each", 98.6, "ms"),
        Result("decode step, batch 1, 512 tokens each: ratio", 1.07, "x", 1.25),
        Result("decode step, batch 1, 512 tokens each: MFU", 9.5, "%"),
        Result("decode step, batch 1, 512 tokens each: MBU", 70.0, "%"),
    ],
    "peers": [
        Result("transformers float32: largest difference of logits from jpd's", 1e-3, ""),
        Result("prefill, batch 8, 128 tokens each: jpd float32", 1234.5, "tokens/s"),
        Result("decode, batch 8, 512 tokens each: jpd float32", 60.0, "tokens/s"),
        Result("decode, batch 8, 512 tokens each: llama.cpp, 4-bit", 90.0, "tokens/s"),
        Result("decode, batch 32, 512 tokens each: jpd float32", 80.0, "tokens/s"),
        Result("decode, batch 32, 512 tokens each: llama.cpp, 4-bit: not ended in", 40.0, "s"),
        Result("prefill, batch 32, 128 tokens each: jpd float32: ended by itself, status", -11, ""),
    ],
    "interference": [Result("disaggregated: ITL p99 under load / alone", 1.1, "x", 1.2)],
    "compare": [
        Result("long: disaggregated / coupled, ITL p99", 0.25, "x"),
        Result("long: disaggregated / coupled, TTFT p50", 1.5, "x"),
        Result("long: disaggregated: goodput not searched; both targets met at 2/s", 75.0, "%"),
    ],
    "commands": [Result("make demo: peak memory", 3.21, "GiB")],
    "soak": [Result("requests that never ended", 0.0, "", 0.0)],
    "serve": [Result("goodput: rate at which 90 % meet both", 1.75, "requests/s")],
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / publish.FOLDER
    folder.mkdir(parents=True)
    for name, results in RESULTS.items():
        write_json(folder / f"{name}.json", results, 12.34)
    for page in (publish.README, publish.GUIDE):
        (tmp_path / page).write_text(f"# Top\n\n{publish.BEGIN}\nold\n{publish.END}\n\nBottom\n")
    return tmp_path


def test_pages_agree_with_the_files_of_results(repo: Path) -> None:
    """The project's own: whoever changes one must change the other, by the command."""
    for path, text in publish.pages(repo).items():
        assert path.read_text() == text, f"{path.name}: run jpd bench all --quick --docs"


def test_figures_go_where_they_belong_and_all_else_stays(checkout: Path) -> None:
    publish.publish(checkout)
    readme, guide, page = (
        (checkout / name).read_text() for name in (publish.README, publish.GUIDE, publish.PAGE)
    )
    assert readme.startswith("# Top\n\n") and readme.endswith("\n\nBottom\n")
    assert "old" not in readme
    assert "| decode step, batch 1, 512 tokens each | 98.6 | 1.07 | 9.5 | 70 |" in readme
    assert "| tokens/s | jpd float32 | llama.cpp, 4-bit |" in readme
    assert "| prefill, batch 8, 128 tokens each | 1,234 | – |" in readme
    assert "| decode, batch 32, 512 tokens each | 80 | not in 40 s |" in readme
    assert "| prefill, batch 32, 128 tokens each | ended by itself | – |" in readme
    assert "tests.support.command_costs" in page and "## commands" in page and "## soak" in page
    assert "| decode, batch 8, 512 tokens each | 60 | 90 |" in readme
    assert "Goodput, rate at which 90 % meet both: 1.75 requests/s." in readme
    for text in (readme, guide):
        assert "disaggregation wins: long: ITL p99 x 0.25." in text
        assert "disaggregation loses: long: TTFT p50 x 1.50." in text
    assert "| long | 0.25 | 1.5 | – | – |" in guide
    assert "| both targets met at the one rate of a quick run | disaggregated |" in guide
    assert "| long | 75 % | – | – |" in guide
    for results in RESULTS.values():
        assert all(result.name in page for result in results)
    before = readme, guide, page
    publish.publish(checkout)
    assert before == tuple(
        (checkout / name).read_text() for name in (publish.README, publish.GUIDE, publish.PAGE)
    )


def test_figures_of_several_machines_or_days_name_each_once() -> None:
    facts = {"command": "c", "seconds": 1.0, "machine": "A", "date": "D", "python": "3.11"}
    one = publish.Document("one", {**facts, "versions": {"jpd": "1"}}, [])
    two = publish.Document("two", {**facts, "machine": "B", "versions": {"jpd": "2"}}, [])
    assert (
        publish.origin([one, two]) == "`c` (1 s) · `c` (1 s); A, B; D; Python 3.11, jpd 1, jpd 2."
    )


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"results": [{"name": "a"}]}'])
def test_what_is_no_file_of_results_is_said(checkout: Path, text: str) -> None:
    (checkout / publish.FOLDER / "other.json").write_text(text)
    with pytest.raises(ConfigError, match="other.json"):
        publish.publish(checkout)


def test_a_page_without_markers_is_refused_and_none_is_written(checkout: Path) -> None:
    (checkout / publish.GUIDE).write_text("# No place\n")
    readme = (checkout / publish.README).read_text()
    with pytest.raises(ConfigError, match="figures: begin"):
        publish.publish(checkout)
    assert (checkout / publish.README).read_text() == readme


def test_each_benchmark_is_a_process_and_one_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that stands in for Python writes what it was asked, or fails."""
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/sh\n[ "$4" = bad ] && exit 2\n'
        """echo '{"results": [{"ok": false}, {"ok": true}], "all": "'"$*"'"}' > "$6"\n"""
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    said: list[str] = []
    results = run_all.run_each(
        ("one", "bad", "two"), lambda name: [f"--of-{name}"], tmp_path / "out", said.append
    )
    values = {result.name: result.value for result in results}
    assert values["all: failed bad"] == 1 and values["all: missed targets"] == 2
    assert values["all: took"] == pytest.approx(
        sum(values[f"{name}: took"] for name in ("one", "bad", "two"))
    )
    written: dict[str, Any] = json.loads((tmp_path / "out" / "two.json").read_text())
    assert written["all"].endswith("--of-two") and "-m jpd bench two --json" in written["all"]
    assert any("bad: exit status 2" in line for line in said)


def test_what_has_not_ended_in_the_limit_of_all_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, ended = tmp_path / "python", tmp_path / "ended"
    fake.write_text(
        f"#!/bin/sh\ntrap 'touch {ended}; exit 130' TERM\nwhile :; do sleep 0.02; done\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    said: list[str] = []
    results = run_all.run_each(("one", "two"), lambda name: [], tmp_path, said.append, 0.5)
    assert ended.exists() and "jpd bench one: not ended in 0.5 s" in said
    assert [r.value for r in results if r.name == "all: failed one two"] == [2]


def test_sigterm_ends_the_benchmark_that_runs_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C at a terminal does: it is asked to end, and its servers with it."""
    fake, ended = tmp_path / "python", tmp_path / "ended"
    fake.write_text(
        f"#!/bin/sh\ntrap 'touch {ended}; exit 130' TERM\ntouch {tmp_path}/begun\n"
        "while :; do sleep 0.02; done\n"
    )
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))

    def end_when_begun() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    killer = threading.Thread(target=end_when_begun)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        killer.start()
        run_all.run_each(("one", "two"), lambda name: [], tmp_path / "out", print)
    killer.join()
    assert ended.exists() and signal.getsignal(signal.SIGTERM) is before


def test_the_processor_is_named_where_linux_says_it(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: other\n")
    assert processor(path) == " (Some CPU @ 2 GHz)"
    assert processor(tmp_path / "missing") == ""
