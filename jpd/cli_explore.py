"""`jpd explore`: the control plane through many orders of events; a failing seed can be replayed.

Needs no model, no mesh file and no devices.
"""

import argparse
import os
import time

from jpd.cli_arguments import count
from jpd.cli_pair import make_console
from jpd.cli_progress import counted_progress
from jpd.explore.explorer import Story, explore, explore_seed

HELP = "run the control plane through random orders of events and check its invariants"
DEFAULT_SEEDS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seeds", type=count, default=DEFAULT_SEEDS, metavar="N", help="how many; default 10000"
    )
    parser.add_argument("--first", type=int, default=0, metavar="S", help="the first of them")
    parser.add_argument("--seed", type=int, metavar="S", help="replay this one and show its events")
    parser.add_argument(
        "--processes",
        type=count,
        default=os.cpu_count() or 1,
        metavar="P",
        help="default: all cores",
    )


def run(options: argparse.Namespace) -> int:
    console = make_console()
    if options.seed is not None:
        return _tell(explore_seed(options.seed))
    start = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    with counted_progress("seeds", len(seeds)) as advance:
        report = explore(seeds, min(options.processes, max(1, len(seeds) // 100)), advance)
    console.print(
        f"{report.num_interleavings:,} interleavings, {report.num_events:,} events, "
        f"{time.monotonic() - start:.1f} s",
        highlight=False,
    )
    if report.failed is None:
        console.print("every invariant held")
        return 0
    _tell(report.failed)
    console.print(f"replay: jpd explore --seed {report.failed.seed}", highlight=False)
    return 1


def _tell(story: Story) -> int:
    """Print a story. The exit code: 1 when an invariant broke in it."""
    console = make_console()
    for number, event in enumerate(story.events):
        console.print(f"{number:4}  {event}", highlight=False, markup=False)
    verdict = story.violation or "every invariant held"
    console.print(f"seed {story.seed}: {verdict}", highlight=False, markup=False)
    return 1 if story.violation else 0
