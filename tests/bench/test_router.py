"""The router's own benchmark runs and reports what it promises; small versions of its replays."""

import json
from pathlib import Path
from typing import get_args

import pytest

from jpd.bench import router, router_decisions, router_overload, router_replay, traces
from jpd.bench.router_replay import Replay, hit_rate_of_one
from jpd.config import PolicyName
from jpd.errors import ConfigError


def test_decisions_are_measured_and_their_growth_is_told() -> None:
    results = {found.name: found for found in router_decisions.results((10_000,), 100)}
    promised = [found for found in results.values() if found.target is not None]
    assert len(promised) == 3
    for case in ("4096 pages", "1024 workers", "index of 10,000"):
        assert results[f"decision p50, {case}"].value > 0.0
    assert 30.0 < results["memory of an indexed page"].value < 300.0


@pytest.mark.parametrize("name", traces.SYNTHETIC)
def test_b04_the_default_policy_hits_and_keeps_the_work_even(name: str) -> None:
    """Everybody shares a page, popular prompts of every size, one-off prompts, bursts."""
    trace = traces.SYNTHETIC[name](800)
    done = Replay("cost", num_workers=4, cache_tokens=1_500_000).run(trace)
    assert done.imbalance <= 1.2
    if name in ("sessions", "shared prompts"):
        assert done.hit_rate >= 0.9 * hit_rate_of_one(trace)
        spread = Replay("round_robin", num_workers=4, cache_tokens=1_500_000).run(trace)
        assert done.hit_rate > spread.hit_rate
        assert done.mean_ttft_seconds <= 0.9 * spread.mean_ttft_seconds


def test_pure_prefix_affinity_herds_on_the_page_that_everybody_shares() -> None:
    """Why load is in the cost: all work ends on one worker of four."""
    trace = traces.sessions(400)
    done = Replay("prefix_affinity", num_workers=4, cache_tokens=100_000_000).run(trace)
    assert done.imbalance > 2.0


def test_sessions_of_a_trace_stay_with_their_workers() -> None:
    trace = traces.sessions(800)
    done = Replay("session_affinity", num_workers=4).run(trace)
    assert done.hit_rate >= 0.9 * hit_rate_of_one(trace)


def test_every_policy_goes_through_a_replay() -> None:
    names = get_args(PolicyName)
    results = router_replay.results("sessions", traces.sessions(60), names)
    assert len(results) == 2 + 4 * len(names)
    assert [found.name for found in results if found.target is not None] == [
        "sessions, cost: page hit rate",
        "sessions, cost: most loaded / mean",
    ]


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def row(milliseconds: int, *page_ids: int) -> dict[str, object]:
    return {
        "timestamp": milliseconds,
        "input_length": 512 * len(page_ids),
        "output_length": 3,
        "hash_ids": list(page_ids),
    }


def test_a_trace_file_is_read_and_its_ticks_are_spread(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 0, 1), row(0, 0, 2), row(3000, 0, 1, 3))
    requests = traces.read_trace(path)
    assert [request.arrival_seconds for request in requests] == [0.0, 1.5, 3.0]
    assert hit_rate_of_one(requests) == 3 / 7
    assert hit_rate_of_one(requests, 1024) == 2 / 7, "two pages: the third prompt finds one"
    done = Replay("cost", num_workers=2).run(requests)
    assert done.hit_rate == 3 / 7


@pytest.mark.parametrize("line", ["{}", "not json", "[1, 2]", '{"timestamp": "x"}', ""])
def test_a_bad_trace_file_is_told_by_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "t.jsonl", row(0, 0), line)
    with pytest.raises(ConfigError, match="line 2"):
        traces.read_trace(path)
    with pytest.raises(ConfigError, match="holds no requests"):
        traces.read_trace(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="--trace"):
        traces.read_trace(tmp_path / "missing.jsonl")


def test_a_csv_trace_says_only_how_long_prompts_are(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    lines = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,513,0"]
    requests = traces.read_trace(write(tmp_path / "t.csv", head, *lines))
    assert [request.num_tokens for request in requests] == [374, 513]
    assert [request.page_ids for request in requests] == [(0,), (1, 2)]
    gap = requests[1].arrival_seconds - requests[0].arrival_seconds
    assert gap == pytest.approx(4.314579, abs=1e-6)
    for wrong in ("x,374,44", "2023-11-16 18:15:46.6805900,many,44", "2023-11-16 18:15:46.6805900"):
        with pytest.raises(ConfigError, match="line 3"):
            traces.read_trace(write(tmp_path / "wrong.csv", head, lines[0], wrong))


def test_b13_overload_keeps_its_goodput_and_is_over_when_it_is_over() -> None:
    done = router_overload.measure(overload_seconds=60.0, calm_seconds=30.0)
    assert done.goodput >= 0.8 * done.peak
    assert done.median_refusal_seconds == 0.0
    assert done.recovered_ttft_seconds <= 2.0 * done.calm_ttft_seconds


@pytest.mark.slow
def test_the_whole_benchmark_runs(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *(row(100 * n, 0, 1, n + 2) for n in range(20)))
    effort = router.Effort((10_000,), 50, 100, overload_seconds=20.0, calm_seconds=20.0)
    results = router.run(effort, path)
    assert len({found.name for found in results}) == len(results)
