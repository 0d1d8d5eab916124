"""`jpd check`: the report of a good pair of model and mesh file, as tables on the terminal.

Only lays out what `jpd.planner` has worked out, and looks at the weights' headers where there are
weights.
"""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from jpd.checkpoint.layout import param_refs
from jpd.checkpoint.model_source import Model, are_weights_here
from jpd.checkpoint.orbax_source import OrbaxSource
from jpd.cli_pair import add_pair_arguments, load_pair, make_console
from jpd.config import CacheConfig
from jpd.errors import ConfigError, Problem
from jpd.nn.params import abstract_params
from jpd.planner.deployment_plan import DeploymentPlan, PairPlan, plan_deployment
from jpd.planner.roofline import seed_rates
from jpd.planner.worker_plan import GIB
from jpd.router.rates import RateSeed
from jpd.transfer.plan import LINKS

HELP = "does this model fit these meshes? Needs no weights and no devices"
PROMPT_TOKENS = (512, 2048, 8192, 32768)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)


def run(options: argparse.Namespace) -> int:
    model, deployment = load_pair(options, need_weights=are_weights_here(options.model))
    problems = _tensor_problems(model)
    try:
        plan = plan_deployment(model.config, deployment)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    if problems:
        raise ConfigError(problems)
    print_report(plan, model.name, make_console())
    return 0


def _tensor_problems(model: Model) -> Sequence[Problem]:
    """Names and shapes of tensors that are here; their numbers are read when they are loaded."""
    if model.source is None or isinstance(model.source, OrbaxSource):  # which starts JAX for it
        return ()
    try:
        param_refs(model.source, model.config, abstract_params(model.config, "float32"))
    except ConfigError as error:
        return error.problems
    return ()


def print_report(plan: DeploymentPlan, model_name: str, console: Console) -> None:
    engine, cache = plan.deployment.engine, plan.deployment.cache
    rounded = f"int8 (what is no matrix in {engine.dtype})"
    held = rounded if plan.config.weights == "int8" else engine.dtype
    console.print(
        f"[bold]{model_name}[/bold] on [bold]{plan.deployment.file}[/bold]: "
        f"{plan.num_params:,} parameters in {held}, KV in {cache.dtype}{_on_wire(cache)}, "
        f"sequences up to {plan.max_model_len:,} tokens, attention by {plan.attention}",
        highlight=False,
    )
    console.print(_worker_table(plan))
    _print_rates(plan, console)
    for pair in plan.pairs:
        _print_pair(pair, plan.max_model_len, console)
    if not plan.pairs:
        console.print("No KV travels: every worker does both prefill and decode.")
    _print_buckets(plan, console)
    hosts = ", ".join(host.name for host in plan.deployment.hosts)
    console.print(f"\nLauncher: {plan.deployment.launch.kind}; hosts: {hosts}", highlight=False)


def _on_wire(cache: CacheConfig) -> str:
    """What is done to KV on its way; empty when it travels as it is stored."""
    parts = [f"{cache.wire_dtype} on the wire"] if cache.wire_dtype != cache.dtype else []
    parts += ["with checksums"] if cache.checksum else []
    return f" ({', '.join(parts)})" if parts else ""


def _print_rates(plan: DeploymentPlan, console: Console) -> None:
    """What the router assumes until it measures; equal workers on one line."""
    policy = plan.deployment.router.policy
    console.print(f"\nRouter: policy {policy}; until measured it assumes", highlight=False)
    kinds: dict[RateSeed, list[str]] = {}
    for name, seed in seed_rates(plan).items():
        kinds.setdefault(seed, []).append(name)
    for seed, names in kinds.items():
        prefill, step = 1024 / seed.prefill.at(1024), 1e3 * seed.step.at(1)
        console.print(
            f"  {', '.join(names)}: 1,024 tokens at {prefill:,.0f}/s, a step in {step:,.2f} ms",
            highlight=False,
        )


def _worker_table(plan: DeploymentPlan) -> Table:
    table = Table(title="Per device", title_justify="left", show_lines=False)
    table.add_column("worker", no_wrap=True)
    for name in ("devices", "tensor", "weights", "KV pool", "pages", "pool tokens"):
        table.add_column(name, justify="right")
    for name in ("largest sequence", "one step, about", "total / memory"):
        table.add_column(name, justify="right")
    for worker in plan.workers:
        memory = "-" if worker.memory_bytes is None else _size(worker.memory_bytes)
        table.add_row(
            worker.worker.name,
            str(len(worker.worker.devices)),
            str(worker.worker.tensor),
            _size(worker.weight_bytes),
            _size(worker.pool_bytes),
            f"{worker.num_pages:,}",
            f"{worker.num_pool_tokens:,}",
            f"{worker.largest_sequence_tokens:,} tokens, {_size(worker.largest_sequence_bytes)}",
            _size(worker.workspace_bytes),
            f"{_size(worker.total_bytes)} / {memory}",
        )
    return table


def _print_pair(pair: PairPlan, max_model_len: int, console: Console) -> None:
    plan = pair.plan
    console.print(
        f"\n[bold]{', '.join(pair.sources)} -> {', '.join(pair.targets)}[/bold]"
        f" ({'one host' if pair.same_host else 'between hosts'})",
        highlight=False,
    )
    console.print(
        f"KV is split in {plan.source.partitions} on the source, {plan.target.partitions} on the "
        f"target, and travels in {plan.wire_partitions}"
        f"{f', each cut in {plan.slices}' if plan.slices > 1 else ''}"
        f"{f', joined by {plan.strands}' if plan.strands > 1 else ''}"
        f"{' (resharded on the devices)' if plan.is_resharded else ''}: "
        f"{plan.bytes_per_token:,} bytes per token, {plan.received_bytes_per_token:,} received by "
        f"all {plan.target.devices} devices, {plan.busiest_link_bytes_per_token:,.0f} over the "
        "busiest link",
        highlight=False,
    )
    table = Table(title="Time to move a prompt, at the link's peak", title_justify="left")
    table.add_column("prompt tokens", justify="right")
    for link in LINKS:
        table.add_column(f"{link.name}, ms", justify="right")
    lengths = [length for length in PROMPT_TOKENS if length <= max_model_len]
    for num_tokens in lengths or [max_model_len]:
        times = (plan.seconds(num_tokens, link) * 1000 for link in LINKS)
        table.add_row(f"{num_tokens:,}", *(f"{time:,.3f}" for time in times))
    console.print(table)
    for link in LINKS:
        rate = f"{link.bytes_per_second / 1e9:g} GB/s"
        console.print(f"  {link.name}: {rate} per device; {link.source}", style="dim")


def _size(num_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes / 1024:,.2f} KiB"


def _layer_groups(plan: DeploymentPlan) -> list[str]:
    """In how many calls a chunk is computed, and what that multiplies."""
    groups = plan.buckets.layer_groups
    if groups.is_whole:
        return ["none"]
    return [
        f"{groups.num_groups} of {' + '.join(str(len(layers)) for layers in groups.ranges)} layers",
        f"KV pieces x {groups.num_groups}",
        f"executables of the model x {groups.num_kinds} and two more for each chunk",
        f"executables that move pages x {groups.num_sizes}",
    ]


def _print_buckets(plan: DeploymentPlan, console: Console) -> None:
    buckets = plan.buckets
    layouts = [f"{layout.num_rows} x {layout.row_length:,}" for layout in buckets.prefill_layouts]
    widths = [f"{width * buckets.page_size:,}" for width in buckets.context_widths]
    lines = (
        ("prefill chunks, rows x tokens", layouts),
        ("page tables, tokens", widths),
        ("layer groups of a chunk", _layer_groups(plan)),
        ("pages moved at once", [str(size) for size in buckets.page_moves]),
        ("decode steps in one call", [str(number) for number in buckets.decode_steps]),
        ("drafts verified in one step", [str(buckets.max_drafts or "none")]),
    )
    console.print("\nBuckets to be compiled:")
    for name, sizes in lines:
        console.print(f"  {name}: {', '.join(sizes)}", highlight=False)
    console.print(
        f"  {buckets.num_prefill_executables} executables to prefill, "
        f"{buckets.num_decode_executables} to decode",
        highlight=False,
    )
