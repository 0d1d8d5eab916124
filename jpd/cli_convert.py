"""`jpd convert SRC DST`: safetensors or GGUF to an Orbax folder."""

import argparse
from pathlib import Path

from jpd.checkpoint.convert import convert
from jpd.cli_pair import add_weights_argument
from jpd.cli_progress import ProgressLine

HELP = "safetensors or GGUF to an Orbax folder, which restores straight into shardings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="card, Hugging Face folder or .gguf file")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to make")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: as the weights are stored"
    )
    add_weights_argument(parser)


def run(options: argparse.Namespace) -> int:
    done = convert(
        options.source,
        options.target,
        dtype=options.dtype,
        weights=options.weights,
        progress=ProgressLine(),
    )
    size = f"{done.num_params:,} parameters, {done.num_bytes / 1e9:.2f} GB as {done.dtype}"
    print(f"converted {options.source} to {done.folder}: {size}")
    return 0
