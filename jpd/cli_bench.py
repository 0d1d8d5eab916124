"""`jpd bench NAME`: run a benchmark, print its table, write its JSON."""

import argparse
import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jpd.api import Server, launch
from jpd.bench import convert, engine, frontend, interference, router, speculation, transfer
from jpd.bench.engine_rig import load_model
from jpd.bench.gap_plot import write_plots
from jpd.bench.kv_peer import NUM_DEVICES
from jpd.bench.results import Result, results_table, write_json
from jpd.bench.serving import measure_serving
from jpd.checkpoint.model_source import open_model
from jpd.checkpoint.package_weights import cache_folder
from jpd.cli_pair import add_weights_argument, load_pair, make_console
from jpd.cli_progress import ProgressLine
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem
from jpd.launch.pinning import pin_process
from jpd.parallel.platform import enable_compilation_cache, ensure_cpu_devices

HELP = "measure; a missed target is exit 1 only with --strict"

Benchmark = Callable[[argparse.Namespace], Sequence[Result]]


def _router(options: argparse.Namespace) -> Sequence[Result]:
    return router.run(trace=options.trace, is_quick=options.quick)


def _frontend(options: argparse.Namespace) -> Sequence[Result]:
    return frontend.run(is_quick=options.quick)


def _engine(options: argparse.Namespace) -> Sequence[Result]:
    model = open_model(options.model)
    ensure_cpu_devices(1)
    enable_compilation_cache(cache_folder() / "xla")
    return engine.run(model, is_quick=options.quick)


def _serving(options: argparse.Namespace) -> Sequence[Result]:
    model, deployment = load_pair(options)
    with launch(model, deployment, progress=ProgressLine()) as server:
        return asyncio.run(measure_serving(server, model.config.vocab_size))


def _speculation(options: argparse.Namespace) -> Sequence[Result]:
    model, deployment = load_pair(options)
    with launch(model, deployment, engine=speculation.ENGINE, progress=ProgressLine()) as server:
        return speculation.run(server)


def _interference(options: argparse.Namespace) -> Sequence[Result]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError([Problem("jpd bench", "cores", cores, "two are needed, one a host")])
    model = open_model(options.model)
    pin_process(cores[:1], "jpd bench", "router")
    effort = interference.QUICK if options.quick else interference.FULL

    def start(deployment: DeploymentConfig) -> Server:
        return launch(model, deployment, progress=ProgressLine())

    gaps = interference.run(start, model.config.vocab_size, (cores[0], cores[1]), effort)
    results = [result for mode in gaps for result in interference.gap_results(mode)]
    if options.plot is not None:
        for path in write_plots(options.plot, gaps, results):
            print(f"plot: {path}")
    return results


def _transfer(options: argparse.Namespace) -> Sequence[Result]:
    model = open_model(options.model)
    ensure_cpu_devices(NUM_DEVICES)
    enable_compilation_cache(cache_folder() / "xla")
    loaded = load_model(model.config, model.require_source())
    return transfer.run(loaded, is_quick=options.quick)


def _convert(options: argparse.Namespace) -> Sequence[Result]:
    return convert.run(is_quick=options.quick)


BENCHMARKS: Mapping[str, Benchmark] = {
    "router": _router,
    "frontend": _frontend,
    "transfer": _transfer,
    "convert": _convert,
    "engine": _engine,
    "serving": _serving,
    "speculation": _speculation,
    "interference": _interference,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = (*BENCHMARKS, "all")
    parser.add_argument("name", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--model",
        default="gemma-3-270m",
        metavar="M",
        help="of all but router, frontend and convert; default gemma-3-270m",
    )
    parser.add_argument(
        "--mesh",
        default="1p1d-cpu",
        metavar="F",
        help="of serving and speculation; default 1p1d-cpu",
    )
    add_weights_argument(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="of router: replay this one too (JSON lines or .csv)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs: engine in two minutes")
    parser.add_argument(
        "--plot", type=Path, metavar="STEM", help="of interference: write STEM.png and STEM.html"
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 on a missed target")


def run(options: argparse.Namespace) -> int:
    results: list[Result] = []
    for name in BENCHMARKS if options.name == "all" else (options.name,):
        found = list(BENCHMARKS[name](options))
        make_console().print(results_table(name, found))
        results += found
    if options.json is not None:
        _write(options.json, results)
    is_good = all(result.ok for result in results)
    return 1 if options.strict and not is_good else 0


def _write(path: Path, results: Sequence[Result]) -> None:
    try:
        write_json(path, results)
    except OSError as error:
        raise ConfigError([Problem("jpd bench", "--json", str(path), str(error))]) from error
