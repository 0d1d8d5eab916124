"""The benchmarks of `jpd bench` that send loads to servers: `serve` and `compare`."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jpd.api import Server, launch
from jpd.bench import compare
from jpd.bench.ceilings import Ceilings, measure_apart
from jpd.bench.floor import is_plain
from jpd.bench.latency import Slo
from jpd.bench.load_client import HttpSender, ServedModel
from jpd.bench.load_plot import draw_compared, draw_served
from jpd.bench.report import write_report
from jpd.bench.results import Result
from jpd.bench.roofline import ModelWork, load_roofline
from jpd.bench.serve import LoadPlan, Served, load_name, measure_server, served_results
from jpd.bench.server_process import ServerFailedError, ServerProcess
from jpd.bench.workloads import WORKLOADS, WorkloadSpec
from jpd.checkpoint.model_source import Model, open_model
from jpd.cli_arguments import amount, count, natural, not_negative
from jpd.cli_pair import load_pair
from jpd.cli_progress import ProgressLine
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.launch.pinning import pin_process

START_SECONDS = 900.0
DEFAULT_LEN, DEFAULT_VOCAB = 2048, 30_000
"""Of a server that does not say."""
TEXT_ROOM = 16
"""Tokens of a context that texts leave free: a server marks their start, and may split a word."""


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serve", "an open-loop load on a server")
    group.add_argument(
        "--url", metavar="U", help="any OpenAI-compatible server; default: a jpd serve of its own"
    )
    group.add_argument("--served-model", default="", metavar="M", help="default: its first")
    group.add_argument(
        "--plain", action="store_true", help="only OpenAI's own fields: text prompts, no ignore_eos"
    )
    group.add_argument("--workload", choices=tuple(WORKLOADS), default="poisson")
    group.add_argument("--rate", type=amount, metavar="R", help="requests/s of the first load")
    group.add_argument("--num-requests", type=count, metavar="N", help="of each load")
    group.add_argument("--prompt-tokens", type=count, default=128, metavar="N", help="mean")
    group.add_argument("--output-tokens", type=count, default=32, metavar="N", help="mean")
    group.add_argument(
        "--spread", type=not_negative, default=0.5, metavar="S", help="of lengths: deviation / mean"
    )
    group.add_argument(
        "--burstiness", type=amount, default=3.0, metavar="B", help="of bursty's gaps, likewise"
    )
    group.add_argument("--ttft-ms", type=not_negative, default=2000.0, metavar="T")
    group.add_argument("--tpot-ms", type=not_negative, default=300.0, metavar="T")
    group.add_argument(
        "--probes", type=count, metavar="N", help="loads of the search for the goodput; 1: none"
    )
    group.add_argument("--max-len", type=count, metavar="N", help="if the server does not tell")
    group.add_argument("--vocab-size", type=count, metavar="N", help="prompts are drawn below it")
    group.add_argument("--seed", type=natural, default=0, metavar="N")


def serve(options: argparse.Namespace) -> Sequence[Result]:
    """A server of our own is measured against its machine's ceilings too."""
    if options.url is not None:
        return _serve_url(options, options.url, None, None)
    model, deployment = load_pair(options)
    dtype = deployment.engine.dtype
    work = ModelWork(model.config, dtype) if is_plain(model.config) else None
    ceilings = None if work is None else measure_apart(dtype)
    if options.vocab_size is None:
        options.vocab_size = model.config.vocab_size
    with _own_server(options) as url:
        return _serve_url(options, url, work, ceilings)


@contextlib.contextmanager
def _own_server(options: argparse.Namespace) -> Iterator[str]:
    arguments = ["--model", options.model, "--mesh", options.mesh, "--http-port", "0"]
    arguments += ["--grpc-port", "0"]
    if options.weights is not None:
        arguments += ["--weights", options.weights]
    try:
        with ServerProcess(arguments) as server:
            yield server.wait_ready(START_SECONDS).http
    except ServerFailedError as error:
        raise ConfigError([Problem("jpd bench", "serve", options.mesh, str(error))]) from error


def _serve_url(
    options: argparse.Namespace, url: str, work: ModelWork | None, ceilings: Ceilings | None
) -> list[Result]:
    plan, served = asyncio.run(_measure_url(options, url))
    results = served_results(plan, served)
    if work is not None and ceilings is not None:
        results += ceilings.results()
        results += load_roofline(load_name(plan), work, served.outcomes, ceilings)
    if options.plot is not None:
        figure = draw_served(load_name(plan), served.outcomes, served.goodput)
        tell(write_report(options.plot, f"A load on {options.model}", figure, results))
    return results


async def _measure_url(options: argparse.Namespace, url: str) -> tuple[LoadPlan, Served]:
    sender = HttpSender(
        url,
        model=options.served_model,
        api_key=os.environ.get("JPD_API_KEY"),
        is_plain=options.plain,
    )
    async with sender:
        plan = make_plan(options, await sender.find_model())
        return plan, await measure_server(sender, plan, say)


def make_plan(options: argparse.Namespace, served: ServedModel) -> LoadPlan:
    """What the options and the server say together. Raises ConfigError with every problem."""
    room = TEXT_ROOM if options.plain else 0
    workload = WorkloadSpec(
        options.workload,
        options.num_requests or (8 if options.quick else 48),
        options.max_len or (served.max_len or DEFAULT_LEN) - room,
        options.vocab_size or DEFAULT_VOCAB,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        spread=options.spread,
        burstiness=options.burstiness,
        trace=options.trace if options.workload == "trace" else None,
        seed=options.seed,
    )
    slo = Slo(options.ttft_ms / 1000, options.tpot_ms / 1000)
    probes = options.probes or (3 if options.quick else 8)
    rate = options.rate or (1.0 if options.quick else 0.5)
    return LoadPlan(workload, rate, slo, probes)


def compare_modes(options: argparse.Namespace) -> Sequence[Result]:
    """Prints where disaggregation wins and loses, too."""
    cores, model = two_cores_of_ours(), open_model(options.model)
    effort = compare.QUICK if options.quick else compare.FULL
    ceilings = measure_apart() if is_plain(model.config) else None
    pin_process(cores[:1], "jpd bench", "router")
    shapes = compare.run(launcher(model), model.config.vocab_size, cores, effort, say)
    results = [result for shape in shapes for result in compare.compare_results(shape)]
    if ceilings is not None:
        work = ModelWork(model.config)
        results += ceilings.results()
        for shape in shapes:
            for mode, outcomes in shape.modes.items():
                results += load_roofline(f"{shape.name}: {mode}", work, outcomes, ceilings)
    told = compare.verdicts(results)
    print("\n".join(told))
    if options.plot is not None:
        figure = draw_compared({shape.name: shape.modes for shape in shapes})
        title = f"{model.name}, coupled and disaggregated on two cores"
        tell(write_report(options.plot, title, figure, results, told))
    return results


def two_cores_of_ours() -> tuple[int, int]:
    """Raises ConfigError where this process has not two."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError([Problem("jpd bench", "cores", cores, "two are needed, one a host")])
    return cores[0], cores[1]


def launcher(model: Model) -> Callable[[DeploymentConfig], Server]:
    """Servers of a model, to be used in `with`."""

    def start(deployment: DeploymentConfig) -> Server:
        return launch(model, deployment, progress=ProgressLine())

    return start


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tell(paths: Sequence[Path]) -> None:
    for path in paths:
        print(f"written: {path}")
