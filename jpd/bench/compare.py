"""`jpd bench compare`: one model on the same two cores, coupled and disaggregated, same requests.

1. Three deployments run at once and take turns, one working while two idle: coupled with whole
   prompts, coupled with chunked prefill, disaggregated. Each has a host on each core.
2. Every shape of load goes to each of them in turn, with the same arrivals and the same prompts.
3. In a full run the goodput of each is searched from there on, a probe of each by turns; a quick
   run has no time for it and tells how many met their targets at its one rate.
4. Of all rounds together: what clients saw, who is best at what, and what moving KV takes.

Rates and targets follow from what a request takes alone, so that they fit any machine and model.
"""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from jpd.bench.api_sender import ApiSender, Launch
from jpd.bench.goodput import Goodput, Probe, goodput_name, narrowed
from jpd.bench.latency import (
    Outcome,
    Slo,
    attainment,
    gaps,
    latency_results,
    percentile,
    tpots,
    ttfts,
)
from jpd.bench.open_loop import Sender, run_load
from jpd.bench.results import Result, Say
from jpd.bench.serve import check_answered
from jpd.bench.two_cores import CHUNKED, DISAGGREGATED, WHOLE, Sizes, deployments
from jpd.bench.workloads import PlannedRequest, WorkloadSpec, at_rate, make_workload

FILE = "jpd bench compare"
COUPLED = (CHUNKED, WHOLE)
LOAD = 0.7
"""Of the rate at which one core would be busy with prompts, were they all it did."""
DECODE_SHARE = 0.25
"""Of a request's decode time that counts against a core: several rows share a step."""
TTFT_SCALE, TPOT_SCALE = 3.0, 1.5
"""Targets, in times of what the request takes alone."""
TIE = 1.05
"""A ratio closer to 1 than this is called even."""
TIMEOUT_SECONDS = 120.0
NUM_ALONE = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of load; lengths as shares of the context."""

    name: str
    prompt_share: float
    output_share: float


LONG_PROMPTS = Shape("long prompts, short answers", 0.6, 0.03)
LONG_ANSWERS = "short prompts, long answers"
SHAPES = (LONG_PROMPTS, Shape(LONG_ANSWERS, 0.05, 0.2))
SHORT_SHAPES = (LONG_PROMPTS, Shape(LONG_ANSWERS, 0.05, 0.09))
"""In less time."""
MIXED = "both at once"
"""Requests of both shapes by turns: answers run while long prompts come."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is sent."""

    sizes: Sizes
    shapes: Sequence[Shape]
    num_requests: int  # of a shape, to each mode, in each round
    num_rounds: int
    num_probes: int  # of each mode and shape, at other rates, in search of the goodput


FULL = Effort(
    Sizes(1024, 640, 128, 16, slots=8, sequences=8, context_buckets=(1024,)), SHAPES, 24, 3, 4
)
QUICK = Effort(
    Sizes(256, 160, 32, 16, slots=8, sequences=8, context_buckets=(256,)), SHORT_SHAPES, 6, 1, 0
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One shape of load, as the clients of each mode saw it."""

    name: str
    rate: float
    slo: Slo
    modes: Mapping[str, Sequence[Outcome]]
    goodputs: Mapping[str, Goodput]  # its first probe is the load itself


def run(
    launch: Launch, vocab_size: int, cores: Sequence[int], effort: Effort, say: Say
) -> list[Compared]:
    """`say` hears of each load. Raises ConfigError when a mode answers nothing."""
    with ExitStack() as running:
        senders: dict[str, Sender] = {
            mode: ApiSender(running.enter_context(launch(deployment)))
            for mode, deployment in deployments(FILE, cores, effort.sizes).items()
        }
        return asyncio.run(measure(senders, vocab_size, effort, say))


async def measure(
    senders: Mapping[str, Sender], vocab_size: int, effort: Effort, say: Say
) -> list[Compared]:
    """Both shapes alone, then mixed."""
    specs = {shape.name: _workload(shape, vocab_size, effort) for shape in effort.shapes}
    alone = {name: await _alone(senders[CHUNKED], spec) for name, spec in specs.items()}
    for mode in (DISAGGREGATED, WHOLE):
        await _alone(senders[mode], specs[LONG_PROMPTS.name])  # first uses are not counted
    compared = [
        await _compare(name, [spec], [alone[name]], senders, effort, say)
        for name, spec in specs.items()
    ]
    mixed = await _compare(MIXED, list(specs.values()), list(alone.values()), senders, effort, say)
    return [*compared, mixed]


def _workload(shape: Shape, vocab_size: int, effort: Effort) -> WorkloadSpec:
    length = effort.sizes.max_model_len
    return WorkloadSpec(
        "poisson",
        effort.num_requests,
        length,
        vocab_size,
        prompt_tokens=min(round(length * shape.prompt_share), effort.sizes.prompt_tokens),
        output_tokens=max(2, round(length * shape.output_share)),
        spread=0.0,  # what a request takes alone is then one number
    )


async def _alone(sender: Sender, spec: WorkloadSpec) -> Outcome:
    """The last of several requests, one after the other."""
    for number in range(NUM_ALONE):
        request = make_workload(spec, run=1_000_000 + number)[:1]
        (outcome,) = await run_load(sender, request, TIMEOUT_SECONDS)
        check_answered([outcome])
    return outcome


async def _compare(
    name: str,
    specs: Sequence[WorkloadSpec],
    alone: Sequence[Outcome],
    senders: Mapping[str, Sender],
    effort: Effort,
    say: Say,
) -> Compared:
    seconds = [o.ttft_seconds + DECODE_SHARE * (o.end_seconds - o.chunk_seconds[0]) for o in alone]
    rate = LOAD / statistics.mean(seconds)
    slo = Slo(
        TTFT_SCALE * max(outcome.ttft_seconds for outcome in alone),
        TPOT_SCALE * max(outcome.tpot_seconds or 0.0 for outcome in alone),
    )
    modes: dict[str, list[Outcome]] = {mode: [] for mode in senders}
    for number in range(effort.num_rounds):
        requests = by_turns([make_workload(spec, number) for spec in specs])
        for mode, sender in senders.items():
            say(f"{name}, {rate:.2g}/s: {mode}, round {number + 1} of {effort.num_rounds} ...")
            modes[mode] += await run_load(sender, at_rate(requests, rate), TIMEOUT_SECONDS)
    goodputs = {
        mode: Goodput((Probe(rate, attainment(outcomes, slo)),)) for mode, outcomes in modes.items()
    }
    for number in range(effort.num_rounds, effort.num_rounds + effort.num_probes):
        requests = by_turns([make_workload(spec, number) for spec in specs])
        for mode, sender in senders.items():
            probe = partial(_probe, sender, requests, slo)
            goodputs[mode] = await narrowed(goodputs[mode], probe)
            say(f"{name}: {mode}, goodput {goodputs[mode].rate:.2g}/s or more ...")
    return Compared(name, rate, slo, modes, goodputs)


async def _probe(
    sender: Sender, requests: Sequence[PlannedRequest], slo: Slo, rate: float
) -> float:
    return attainment(await run_load(sender, at_rate(requests, rate), TIMEOUT_SECONDS), slo)


def by_turns(workloads: Sequence[Sequence[PlannedRequest]]) -> list[PlannedRequest]:
    """Request i is that of workload i mod n: as many as one of them has, at the same times."""
    return [row[number % len(row)] for number, row in enumerate(zip(*workloads, strict=True))]


def compare_results(compared: Compared) -> list[Result]:
    """What clients of each mode saw, what disaggregation changed, and what moving KV took."""
    results = []
    for mode, outcomes in compared.modes.items():
        name = f"{compared.name}, {compared.rate:.2g}/s: {mode}"
        results += latency_results(name, outcomes, compared.slo)
    results += goodput_results(compared)
    return [*results, *ratio_results(compared), *transfer_results(compared)]


def goodput_results(compared: Compared) -> list[Result]:
    """Of each mode; without a search what is known of it: how many met both targets at one rate."""
    results = []
    for mode, goodput in compared.goodputs.items():
        (first, *others) = goodput.probes
        if others:
            name, value, unit = goodput_name(goodput), goodput.rate or goodput.lowest, "requests/s"
        else:
            name = f"goodput not searched; both targets met at {first.rate:.2g}/s"
            value, unit = 100 * first.attainment, "%"
        results.append(Result(f"{compared.name}: {mode}: {name}", value, unit))
    return results


def ratio_results(compared: Compared) -> list[Result]:
    """Disaggregated by the better of the two coupled ones, measure by measure."""
    apart = compared.modes[DISAGGREGATED]
    coupled = [compared.modes[mode] for mode in COUPLED]
    results = []
    for measure, share, values_of in (
        ("TTFT p50", 0.5, ttfts),
        ("TTFT p99", 0.99, ttfts),
        ("TPOT p50", 0.5, tpots),
        ("ITL p99", 0.99, gaps),
    ):
        best = min(percentile(values_of(outcomes), share) for outcomes in coupled)
        ratio = percentile(values_of(apart), share) / best
        results.append(Result(f"{compared.name}: disaggregated / coupled, {measure}", ratio, "x"))
    met = [100 * attainment(outcomes, compared.slo) for outcomes in (apart, *coupled)]
    name = f"{compared.name}: disaggregated - coupled, both targets met"
    return [*results, Result(name, met[0] - max(met[1:]), "points")]


def transfer_results(compared: Compared) -> list[Result]:
    """Of disaggregated requests: what KV took between the first token and its arrival."""
    found = [o for o in compared.modes[DISAGGREGATED] if o.is_answered and o.details]
    if not found:
        return []
    shares = [o.details["transfer_seconds"] / (o.end_seconds - o.due_seconds) for o in found]
    moved = statistics.median(o.details["kv_bytes"] for o in found)
    seconds = statistics.median(o.details["transfer_seconds"] for o in found)
    return [
        Result(f"{compared.name}: KV moved by a request", moved / (1 << 20), "MiB"),
        Result(f"{compared.name}: after the first token KV still took", seconds * 1000, "ms"),
        Result(
            f"{compared.name}: of a request's time, that was", statistics.median(shares) * 100, "%"
        ),
    ]


def verdicts(results: Sequence[Result]) -> list[str]:
    """Where disaggregation wins, where it loses, from the results alone."""
    kinds: dict[str, list[str]] = {"wins": [], "loses": [], "is even": []}
    for result in results:
        where, is_ratio, measure = result.name.partition(": disaggregated / coupled, ")
        if is_ratio:
            won, lost = result.value < 1.0 / TIE, result.value > TIE
            kind = "wins" if won else "loses" if lost else "is even"
            kinds[kind].append(f"{where}: {measure} x {result.value:.2f}")
    return [
        f"disaggregation {kind}: {'; '.join(told) or 'nowhere'}" for kind, told in kinds.items()
    ]
