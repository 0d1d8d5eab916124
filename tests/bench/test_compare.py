"""The comparison in virtual time: who wins is what the servers do, and it is told as such."""

from dataclasses import replace

import pytest

from jpd.bench.compare import (
    MIXED,
    QUICK,
    SHAPES,
    Compared,
    by_turns,
    compare_results,
    goodput_results,
    measure,
    verdicts,
)
from jpd.bench.goodput import Goodput, Probe
from jpd.bench.latency import Outcome, Slo
from jpd.bench.results import Result
from jpd.bench.two_cores import CHUNKED, DISAGGREGATED, WHOLE, deployments
from jpd.bench.workloads import PlannedRequest
from tests.bench.serial_server import SerialServer
from tests.router.virtual_time import virtual

EFFORT = replace(QUICK, shapes=SHAPES, num_requests=20, num_rounds=2, num_probes=3)


@virtual
async def test_where_prompts_stall_answers_disaggregation_wins_their_gaps() -> None:
    """Coupled: no token while a prompt is prefilled. Apart: a step takes a little longer."""
    moved = {"transfer_seconds": 0.05, "kv_bytes": float(1 << 20)}
    servers = {
        DISAGGREGATED: SerialServer(1.0, 0.12, details=moved),
        CHUNKED: SerialServer(1.0, 0.1, shares=True),
        WHOLE: SerialServer(1.0, 0.1, shares=True),
    }
    compared = await measure(servers, 1000, EFFORT, print)
    assert [one.name for one in compared] == [*(shape.name for shape in SHAPES), MIXED]
    for one in compared:
        assert {len(outcomes) for outcomes in one.modes.values()} == {40}
        for mode in servers:
            first, *others = one.goodputs[mode].probes
            assert first.rate == one.rate and others, "the load itself begins the search"
    sent = [[request.token_ids for request in server.sent[2:]] for server in servers.values()]
    assert sent[1][-100:] == sent[0][-100:] == sent[2][-100:], "all modes get the same"
    results = [result for one in compared for result in compare_results(one)]
    values = {result.name: result.value for result in results}
    gap = values[f"{MIXED}: disaggregated / coupled, ITL p99"]
    assert gap == pytest.approx(0.12 / 1.1, rel=0.2)
    found = [name for name in values if f"{MIXED}: {WHOLE}: goodput: rate at which" in name]
    assert len(found) == 1
    assert values[f"{MIXED}: KV moved by a request"] == 1.0
    assert values[f"{MIXED}: after the first token KV still took"] == pytest.approx(50.0)
    assert 0.0 < values[f"{MIXED}: of a request's time, that was"] < 5.0
    assert f"{MIXED}: ITL p99 x {gap:.2f}" in verdicts(results)[0]


def test_a_quick_run_says_that_it_searched_no_goodput() -> None:
    met, missed = Outcome(0.0, 0.0, (0.5, 0.6), 2, 2, 0.6), Outcome(0.0, 0.0, (3.0, 3.1), 2, 2, 3.1)
    slo = Slo(1.0, 1.0)
    quick = Compared(
        "mixed", 2.0, slo, {WHOLE: [met, missed]}, {WHOLE: Goodput((Probe(2.0, 0.5),))}
    )
    (result,) = goodput_results(quick)
    assert result.name == f"mixed: {WHOLE}: goodput not searched; both targets met at 2/s"
    assert (result.value, result.unit) == (50.0, "%")


def test_verdicts_follow_from_ratios_alone() -> None:
    def ratio(where: str, value: float) -> Result:
        return Result(f"{where}: disaggregated / coupled, ITL p99", value, "x")

    told = verdicts([ratio("long", 0.4), ratio("short", 1.3), ratio("mixed", 1.04)])
    assert told == [
        "disaggregation wins: long: ITL p99 x 0.40",
        "disaggregation loses: short: ITL p99 x 1.30",
        "disaggregation is even: mixed: ITL p99 x 1.04",
    ]
    assert verdicts([])[0] == "disaggregation wins: nowhere"


def test_a_mixed_load_takes_both_shapes_by_turns() -> None:
    loads = [[PlannedRequest(float(n), (kind,), 2) for n in range(4)] for kind in (1, 2)]
    assert [one.token_ids[0] for one in by_turns(loads)] == [1, 2, 1, 2]
    assert [one.arrival_seconds for one in by_turns(loads)] == [0.0, 1.0, 2.0, 3.0]


def test_modes_share_all_sizes() -> None:
    made = deployments("file", (0, 1), QUICK.sizes)
    assert {config.engine.max_model_len for config in made.values()} == {256}
    assert made[WHOLE].engine.prefill_chunk == 160 and made[CHUNKED].engine.prefill_chunk == 32
