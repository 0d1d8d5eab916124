"""`jpd bench soak --minutes M`: a deployment of its own, hosts killed, and what was left of it."""

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence

from jpd.api import launch
from jpd.bench import host_killer, two_cores
from jpd.bench.results import Result
from jpd.bench.soak import Effort, Soak
from jpd.bench.soak_requests import Draw, Limits
from jpd.checkpoint.model_source import Model, open_model
from jpd.cli_arguments import amount, not_negative
from jpd.cli_bench_load import two_cores_of_ours
from jpd.cli_progress import ProgressLine
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem

SIZES = two_cores.Sizes(256, 256, 64, 16, slots=4, sequences=3, context_buckets=(256,))
MAX_DRAFTS = 3
FIRST_TOKEN = 3


def add_soak_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("soak", "traffic of every kind, and hosts that are killed")
    group.add_argument("--minutes", type=amount, default=1.0, metavar="M", help="default 1")
    group.add_argument(
        "--kill-seconds",
        type=not_negative,
        default=30.0,
        metavar="S",
        help="from a recovery to the next kill, default 30; 0: hosts are left alone",
    )


def soak(options: argparse.Namespace) -> Sequence[Result]:
    """Prints what broke an invariant, first of all."""
    if sys.platform != "linux":
        rule = "reads /proc, which only Linux has"
        raise ConfigError([Problem("jpd bench", "soak", sys.platform, rule)])
    model = open_model(options.model)
    draw = random.Random(options.seed)
    kill = (lambda: host_killer.kill_one(draw)) if options.kill_seconds > 0.0 else None
    effort = Effort(seconds=60.0 * options.minutes, kill_seconds=options.kill_seconds)
    with launch(model, deployment(), progress=ProgressLine(), can_prefill_locally=True) as server:
        made = Soak(
            server,  # type: ignore[arg-type]  # its options are named, a soak draws any of them
            Draw(options.seed, limits_of(model)),
            effort,
            host_killer.memory_bytes,
            kill,
        )
        results = made.run()
    for words in made.ledger.words:
        print(words)
    return results


def deployment() -> DeploymentConfig:
    """Two hosts that each prefill and decode, in pools that are always short."""
    made = two_cores.whole_hosts("jpd bench soak", two_cores_of_ours(), SIZES)
    return dataclasses.replace(
        made,
        cache=dataclasses.replace(made.cache, retain_seconds=60.0, reserve_tokens=SIZES.page_size),
        engine=dataclasses.replace(
            made.engine, max_speculative_tokens=MAX_DRAFTS, max_steps_per_call=4
        ),
    )


def limits_of(model: Model) -> Limits:
    return Limits(
        min(SIZES.max_model_len, model.config.max_len),
        model.config.vocab_size,
        SIZES.page_size,
        SIZES.chunk,
        FIRST_TOKEN,
        has_text=model.tokenizer is not None,
        max_drafts=MAX_DRAFTS,
    )
