"""The load generator in virtual time, on a server whose times are known."""

import asyncio
import math

import pytest

from jpd.bench.goodput import Goodput, Probe, search_goodput
from jpd.bench.latency import Outcome, Slo, attainment, latency_results, percentile
from jpd.bench.open_loop import run_load
from jpd.bench.serve import LoadPlan, measure_server, served_results
from jpd.bench.workloads import PlannedRequest, WorkloadSpec
from jpd.errors import ConfigError
from tests.bench.serial_server import SerialServer
from tests.router.virtual_time import virtual

PREFILL, STEP = 1.0, 0.1


def planned(*arrivals: float, max_tokens: int = 3) -> list[PlannedRequest]:
    return [PlannedRequest(arrival, (5, 6), max_tokens) for arrival in arrivals]


def outcome(ttft: float, tpot: float, num_tokens: int = 3, error: str | None = None) -> Outcome:
    times = tuple(ttft + tpot * number for number in range(num_tokens))
    return Outcome(0.0, 0.0, times, 2, num_tokens, times[-1], error)


@virtual
async def test_slow_answers_delay_no_request_and_count_from_when_it_was_due() -> None:
    """Three at once on a server that takes a second each: they wait for one another, all are sent
    on time, and what they waited is theirs."""
    server = SerialServer(PREFILL, STEP)
    found = await run_load(server, planned(0.0, 0.1, 0.2), timeout_seconds=10.0)
    assert [one.sent_seconds for one in found] == pytest.approx([0.0, 0.1, 0.2])
    assert [one.ttft_seconds for one in found] == pytest.approx([1.0, 1.9, 2.8])
    assert [one.tpot_seconds for one in found] == pytest.approx([STEP] * 3)
    assert [gap for one in found for gap in one.gaps_seconds] == pytest.approx([STEP] * 6)
    assert [one.num_prompt_tokens for one in found] == [7] * 3, "as the server counts them"


@virtual
async def test_a_load_generator_that_falls_behind_does_not_flatter() -> None:
    """Its loop stands still for a second: what was due meanwhile is late by that much."""

    class Hog(SerialServer):
        async def send(self, request: PlannedRequest):  # type: ignore[no-untyped-def]
            loop = asyncio.get_running_loop()
            if not self.sent:
                loop._jumping.now += 1.0  # type: ignore[attr-defined]
            async for part in super().send(request):
                yield part

    found = await run_load(Hog(0.0, STEP), planned(0.0, 0.5), timeout_seconds=10.0)
    assert found[1].sent_seconds == pytest.approx(1.0)
    assert found[1].ttft_seconds == pytest.approx(0.5)
    results = {one.name: one.value for one in latency_results("load", found, Slo(1.0, 1.0))}
    assert results["load: latest sending after its time"] == pytest.approx(500.0)


@virtual
async def test_failed_and_late_requests_are_told_and_never_meet_a_target() -> None:
    server = SerialServer(PREFILL, STEP, fails_at=0)
    found = await run_load(server, planned(0.0, 0.0, 0.0), timeout_seconds=1.5)
    assert [one.error for one in found] == ["HTTP 503: no room", None, "not answered within 1.5 s"]
    assert attainment(found, Slo(math.inf, math.inf)) == pytest.approx(1 / 3)


def test_both_targets_must_be_met_by_the_same_request() -> None:
    slo = Slo(1.0, 0.1)
    good, slow_start, slow_steps = outcome(1.0, 0.1), outcome(1.1, 0.0), outcome(0.0, 0.11)
    failed, short = outcome(0.5, 0.05, error="gone"), outcome(0.5, 0.0, num_tokens=1)
    assert [slo.is_met(one) for one in (good, slow_start, slow_steps, failed, short)] == [
        *(True, False, False, False, True)
    ]
    assert attainment([good, slow_start, slow_steps, short], slo) == 0.5


def test_percentiles_and_throughput_by_hand() -> None:
    values = [float(value) for value in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (50.0, 99.0)
    assert percentile([3.0], 0.99) == 3.0
    found = [outcome(0.1 * number, 0.02) for number in range(1, 11)]
    results = {one.name: one.value for one in latency_results("load", found, Slo(0.45, 1.0))}
    assert results["load: TTFT p50"] == pytest.approx(600.0)
    assert results["load: TTFT p90"] == pytest.approx(1000.0)
    assert results["load: ITL p99"] == pytest.approx(20.0)
    assert results["load: output"] == pytest.approx(30 / 1.04)
    assert results["load: prompt and output"] == pytest.approx(50 / 1.04)
    assert results["load: TTFT 450 ms and TPOT 1000 ms met"] == 40.0


@pytest.mark.parametrize("first_rate", [0.01, 1.0, 5.0, 80.0])
def test_the_goodput_is_found_from_above_and_from_below(first_rate: float) -> None:
    async def measure(rate: float) -> float:
        return 0.95 if rate <= 5.0 else 0.5

    found = asyncio.run(search_goodput(measure, first_rate, max_probes=20))
    assert found.is_found and found.rate <= 5.0 < found.bad <= 1.1 * found.rate
    assert found.probes[0].rate == first_rate


def test_a_search_that_is_cut_short_says_so() -> None:
    async def never(rate: float) -> float:
        return 0.0

    async def always(rate: float) -> float:
        return 1.0

    found = asyncio.run(search_goodput(never, 8.0, max_probes=3))
    assert [probe.rate for probe in found.probes] == [8.0, 4.0, 2.0]
    assert found.rate == 0.0 and not found.is_found
    found = asyncio.run(search_goodput(always, 8.0, max_probes=3))
    assert found.rate == 32.0 and not found.is_found


def test_a_good_rate_above_a_bad_one_is_chance() -> None:
    found = Goodput((Probe(1.0, 0.95), Probe(2.0, 0.5), Probe(4.0, 0.95)))
    assert (found.rate, found.bad) == (1.0, 2.0)


@virtual
async def test_a_server_with_a_known_capacity_has_that_goodput() -> None:
    """One prompt a second: targets of some prompts' time are met up to most of that rate."""
    workload = WorkloadSpec("poisson", 200, 100, 100, 10, 4, spread=0.0)
    plan = LoadPlan(workload, 0.1, Slo(4.0, 0.2), max_probes=20)
    server = SerialServer(PREFILL, STEP)
    served = await measure_server(server, plan, print)
    assert served.goodput.is_found and 0.4 < served.goodput.rate < 1.0
    assert len(served.outcomes) == 200, "of the first rate, not of a probe"
    prompts = {request.token_ids for request in server.sent}
    assert len(prompts) == len(server.sent), "no probe repeats another's prompts"
    results = {one.name: one.value for one in served_results(plan, served)}
    assert results["goodput: rate at which 90 % meet both"] == served.goodput.rate
    tight = LoadPlan(workload, 0.1, Slo(0.9, 0.2), max_probes=2)
    hopeless = await measure_server(SerialServer(PREFILL, STEP), tight, print)
    names = [one.name for one in served_results(tight, hopeless)]
    assert "goodput: rate at which 90 % meet both, below" in names


@virtual
async def test_a_server_that_answers_nothing_is_an_error() -> None:
    workload = WorkloadSpec("poisson", 4, 100, 100, 10, 4)
    plan = LoadPlan(workload, 0.1, Slo(4.0, 0.2), 1, timeout_seconds=0.5)
    with pytest.raises(ConfigError, match="nothing was answered: not answered within 0.5 s"):
        await measure_server(SerialServer(PREFILL, STEP), plan, print)


@virtual
async def test_why_requests_of_a_load_failed_is_said() -> None:
    workload = WorkloadSpec("poisson", 4, 100, 100, 10, 4)
    said: list[str] = []
    server = SerialServer(PREFILL, STEP, fails_at=2)
    await measure_server(server, LoadPlan(workload, 0.1, Slo(9.0, 0.2), 1), said.append)
    assert said == [
        "4 requests at 0.1/s: 75% met both targets; 1 failed, the first: HTTP 503: no room"
    ]
