"""`jpd bench NAME`: run a benchmark, print its table, write its JSON."""

import argparse
import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from jpd.api import launch
from jpd.bench import (
    convert,
    engine,
    frontend,
    interference,
    peers,
    publish,
    router,
    run_all,
    speculation,
    transfer,
)
from jpd.bench.engine_rig import load_model
from jpd.bench.gap_plot import TITLE, draw_gaps
from jpd.bench.kv_peer import NUM_DEVICES
from jpd.bench.report import can_draw, check_can_draw, write_report
from jpd.bench.results import Result, results_table, write_json
from jpd.checkpoint.model_source import open_model
from jpd.checkpoint.package_weights import cache_folder
from jpd.cli_arguments import check_writable
from jpd.cli_bench_load import (
    add_load_arguments,
    compare_modes,
    launcher,
    say,
    serve,
    tell,
    two_cores_of_ours,
)
from jpd.cli_bench_soak import add_soak_arguments, soak
from jpd.cli_pair import add_weights_argument, load_pair, make_console
from jpd.cli_progress import ProgressLine
from jpd.errors import ConfigError, Problem
from jpd.launch.pinning import pin_process
from jpd.parallel.platform import enable_compilation_cache, ensure_cpu_devices

HELP = "measure; a missed target is exit 1 only with --strict"

Benchmark = Callable[[argparse.Namespace], Sequence[Result]]


def _router(options: argparse.Namespace) -> Sequence[Result]:
    return router.run(router.QUICK if options.quick else router.FULL, options.trace)


def _frontend(options: argparse.Namespace) -> Sequence[Result]:
    return frontend.run(is_quick=options.quick)


def _engine(options: argparse.Namespace) -> Sequence[Result]:
    model = open_model(options.model)
    ensure_cpu_devices(1)
    enable_compilation_cache(cache_folder() / "xla")
    return engine.run(model, is_quick=options.quick)


def _peers(options: argparse.Namespace) -> Sequence[Result]:
    return peers.run(options.model, say, is_quick=options.quick)


def _speculation(options: argparse.Namespace) -> Sequence[Result]:
    model, deployment = load_pair(options)
    effort = speculation.QUICK if options.quick else speculation.FULL
    with launch(model, deployment, engine=speculation.ENGINE, progress=ProgressLine()) as server:
        return speculation.run(server, effort)


def _interference(options: argparse.Namespace) -> Sequence[Result]:
    cores, model = two_cores_of_ours(), open_model(options.model)
    pin_process(cores[:1], "jpd bench", "router")
    effort = interference.QUICK if options.quick else interference.FULL
    gaps = interference.run(launcher(model), model.config.vocab_size, cores, effort)
    results = [result for mode in gaps for result in interference.gap_results(mode)]
    if options.plot is not None:
        tell(write_report(options.plot, TITLE, draw_gaps(gaps), results))
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
    "peers": _peers,
    "serve": serve,
    "speculation": _speculation,
    "interference": _interference,
    "compare": compare_modes,
    "soak": soak,
}


PLOTTED = ("serve", "interference", "compare")
APART = ("peers", "soak")
"""What `all` leaves out: other programs, and what takes as long as one likes."""


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
        help="of serve and speculation; default 1p1d-cpu",
    )
    add_weights_argument(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="of router and serve: replay it (JSON lines or .csv)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer runs: all in ten minutes")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="STEM",
        help="of serve, interference and compare: write STEM.png and STEM.html",
    )
    parser.add_argument("--strict", action="store_true", help="exit 1 on a missed target")
    add_load_arguments(parser)
    add_soak_arguments(parser)
    group = parser.add_argument_group("all", "each benchmark in a process of its own")
    group.add_argument(
        "--out", type=Path, default=Path("bench-results"), metavar="FOLDER", help="of their files"
    )
    group.add_argument(
        "--docs", action="store_true", help="to docs/ of this checkout, and the pages with figures"
    )


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        check_can_draw()
    if options.json is not None:
        check_writable(options.json, "jpd bench", "--json")
    start = time.monotonic()
    with sigterm_as_interrupt():
        is_all = options.name == "all"
        results = _all(options) if is_all else list(BENCHMARKS[options.name](options))
    make_console().print(results_table(options.name, results))
    if options.json is not None:
        _write(options.json, results, time.monotonic() - start)
    is_good = all(result.ok for result in results)
    return 1 if options.strict and not is_good else 0


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """As Ctrl-C, so that servers and hosts of a benchmark end with it. On the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _all(options: argparse.Namespace) -> list[Result]:
    """All but the soak and the peers."""
    if options.docs and not Path(publish.README).is_file():
        rule = "is for a checkout of jpd, to be run in its folder"
        raise ConfigError([Problem("jpd bench all", "--docs", str(Path.cwd()), rule)])
    folder = Path(publish.FOLDER) if options.docs else options.out

    def options_of(name: str) -> list[str]:
        found = ["--model", options.model, "--mesh", options.mesh]
        found += ["--quick"] if options.quick else []
        is_drawn = name in PLOTTED and can_draw()
        return found + (["--plot", str(folder / name)] if is_drawn else [])

    names = [name for name in BENCHMARKS if name not in APART]
    limit = run_all.QUICK_SECONDS if options.quick else math.inf
    results = run_all.run_each(names, options_of, folder, say, limit)
    if options.docs:
        for path in publish.publish(Path()):
            print(f"written: {path}")
    return results


def _write(path: Path, results: Sequence[Result], seconds: float) -> None:
    try:
        write_json(path, results, seconds)
    except OSError as error:
        raise ConfigError([Problem("jpd bench", "--json", str(path), str(error))]) from error
