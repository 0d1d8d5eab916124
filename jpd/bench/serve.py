"""`jpd bench serve`: an open-loop load on any OpenAI-compatible server, and its goodput.

1. A request alone, so that connections and first uses are not counted.
2. The load at the rate that was asked for: what clients saw.
3. The search for the goodput, each probe with tokens that the server has not seen.
Knows no HTTP: a Sender does. Called by the command line and by `jpd.bench.compare`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jpd.bench.goodput import Goodput, goodput_name, search_goodput
from jpd.bench.latency import Outcome, Slo, attainment, latency_results
from jpd.bench.open_loop import Sender, run_load
from jpd.bench.results import Result, Say
from jpd.bench.workloads import WorkloadSpec, at_rate, make_workload
from jpd.errors import ConfigError, Problem

WARM_RUN = 1_000_000
"""A run that no load has."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent, how fast, and what it is held to."""

    workload: WorkloadSpec
    rate: float  # requests per second
    slo: Slo
    max_probes: int  # of the search for the goodput, the first load included; 1: no search
    timeout_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """What came of it."""

    outcomes: Sequence[Outcome]  # at the rate that was asked for
    goodput: Goodput


async def measure_server(sender: Sender, plan: LoadPlan, say: Say) -> Served:
    """`say` hears of each load. Raises ConfigError when the server answers nothing of the first."""
    await warm(sender, plan)
    runs, first = itertools.count(), list[Outcome]()

    async def probe(rate: float) -> float:
        requests = at_rate(make_workload(plan.workload, next(runs)), rate)
        outcomes = await run_load(sender, requests, plan.timeout_seconds)
        first.extend(() if first else outcomes)
        share = attainment(outcomes, plan.slo)
        failed = [o.error or "without a token" for o in outcomes if not o.is_answered]
        why = f"; {len(failed)} failed, the first: {failed[0]}" if failed else ""
        say(f"{len(requests)} requests at {rate:.3g}/s: {share:.0%} met both targets{why}")
        return share

    goodput = await search_goodput(probe, plan.rate, plan.max_probes)
    check_answered(first)
    return Served(first, goodput)


async def warm(sender: Sender, plan: LoadPlan) -> None:
    """Raises ConfigError when it is not answered."""
    requests = make_workload(plan.workload, WARM_RUN)[:1]
    check_answered(await run_load(sender, requests, plan.timeout_seconds))


def check_answered(outcomes: Sequence[Outcome]) -> None:
    if not any(outcome.is_answered for outcome in outcomes):
        rule = f"nothing was answered: {outcomes[0].error}"
        raise ConfigError([Problem("jpd bench", "server", len(outcomes), rule)])


def load_name(plan: LoadPlan) -> str:
    work = plan.workload
    return f"{work.kind}, {work.num_requests} requests at {plan.rate:.3g}/s"


def served_results(plan: LoadPlan, served: Served) -> list[Result]:
    name = load_name(plan)
    results = latency_results(name, served.outcomes, plan.slo)
    if plan.max_probes == 1:
        return results
    found = served.goodput
    return [
        *results,
        Result(goodput_name(found), found.rate or found.lowest, "requests/s"),
        *(
            Result(f"goodput: met at {probe.rate:.3g}/s", probe.attainment * 100, "%")
            for probe in sorted(found.probes, key=lambda probe: probe.rate)
        ),
    ]
