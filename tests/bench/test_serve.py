"""`jpd bench serve` over real HTTP, against a server whose workers have no devices."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jpd.api import Server
from jpd.bench.goodput import Goodput, Probe
from jpd.bench.latency import Outcome, Slo, latency_results
from jpd.bench.load_client import HttpSender, ServedModel, read_event
from jpd.bench.load_plot import draw_served
from jpd.bench.open_loop import Part, SendError
from jpd.bench.report import write_report
from jpd.bench.workloads import PlannedRequest
from jpd.cli import main
from jpd.cli_bench import add_arguments
from jpd.cli_bench_load import make_plan
from jpd.errors import ConfigError
from tests.frontend.fake_router import VOCAB_SIZE
from tests.support.fake_server import FakeFleet, make_tiny_model, write_deployment

LOAD = "--num-requests 6 --rate 50 --prompt-tokens 8 --output-tokens 6 --probes 2".split()


@pytest.fixture(scope="module")
def url(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    deployment = write_deployment(tmp_path_factory.mktemp("mesh"))
    fleet = FakeFleet(step_seconds=0.001)
    with Server(make_tiny_model(repo), deployment, lambda: fleet) as server:
        yield f"http://127.0.0.1:{server.serve(grpc_port=None).http_port}"
        assert fleet.num_held == 0


@pytest.mark.parametrize("extra", [[], ["--workload", "sessions"], ["--plain"]])
def test_a_load_over_http_gives_every_number(url: str, tmp_path: Path, extra: list[str]) -> None:
    found = tmp_path / "serve.json"
    options = [*LOAD, "--vocab-size", str(VOCAB_SIZE), "--json", str(found)]
    assert main(["bench", "serve", "--url", url, *options, *extra]) == 0
    document = json.loads(found.read_text())
    values = {result["name"].rpartition(": ")[2]: result["value"] for result in document["results"]}
    for measure in ("TTFT", "TPOT", "ITL"):
        assert {f"{measure} {share}" for share in ("p50", "p90", "p99")} <= values.keys()
    assert values["requests that failed"] == 0 and values["output"] > 0
    assert any(name.startswith("rate at which 90 % meet both") for name in values)


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times = (0.1, 0.2, 0.4)
    outcomes = [Outcome(0.0, 0.0, times, 2, 3, 0.4)] * 2
    figure = draw_served("load", outcomes, Goodput((Probe(1.0, 1.0), Probe(2.0, 0.5))))
    results = latency_results("load", outcomes, Slo(1.0, 1.0))
    png, page = write_report(tmp_path / "a.b", "A < B", figure, results, ["it & that"])
    assert (png.name, page.name) == ("a.b.png", "a.b.html")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert (
        "<svg" in text and "<script" not in text and "A &lt; B" in text and "it &amp; that" in text
    )
    assert all(result.name in text for result in results)
    with pytest.raises(ConfigError, match="--plot"):
        write_report(tmp_path / "no" / "folder", "A", figure, results)


def test_what_is_no_server_or_refuses_everything_is_said(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", *LOAD]) == 2
    assert "must be an OpenAI-compatible server" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", url, "--served-model", "other", *LOAD]) == 2
    assert "the server has tiny" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", url, "--vocab-size", "99999", *LOAD]) == 2
    assert "nothing was answered: HTTP 400" in capsys.readouterr().err


def test_events_of_other_servers() -> None:
    """Chunks without usage are counted; a usage counts for itself; an error is one."""
    assert read_event('{"choices": [{"text": "a"}], "usage": null}') == Part(1)
    assert read_event('{"choices": [{"text": ""}]}') == Part(0)
    usage = '{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 9}}'
    assert read_event(usage) == Part(0, 5, 9)
    for bad in ('{"error": {"message": "no"}}', "not json", "[1]"):
        with pytest.raises(SendError):
            read_event(bad)


@pytest.mark.parametrize(
    ("extra", "most"),
    [([], 512), (["--plain"], 496), (["--plain", "--max-len", "300"], 300)],
)
def test_texts_leave_room_for_what_a_server_adds(extra: list[str], most: int) -> None:
    """A trace fills the context; a mark at the start of its longest text would be one too many."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["serve", *LOAD, *extra])
    assert make_plan(options, ServedModel("m", 512)).workload.max_len == most


def test_a_plain_body_has_openai_fields_only() -> None:
    request = PlannedRequest(0.0, (5, 6, 7), 4, "session-1")
    sender = HttpSender("http://127.0.0.1:9/v1/", model="m")
    body = sender.body(request)
    assert body["prompt"] == [5, 6, 7] and body["ignore_eos"] and body["session_id"] == "session-1"
    plain = HttpSender("http://127.0.0.1:9", model="m", is_plain=True).body(request)
    assert plain.keys() == body.keys() - {"ignore_eos", "session_id"}
    assert len(str(plain["prompt"]).split()) == 3
