"""`jpd generate`: launch the pair, continue the prompts, print the text as it comes."""

import argparse

from jpd.api import GenerateOptions, launch
from jpd.cli_pair import add_pair_arguments, load_pair, parse_prompt
from jpd.cli_progress import ProgressLine

HELP = "continue prompts and print the text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of sampling; default: a new one")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text, or ids as [1, 2, 3]")


def run(options: argparse.Namespace) -> int:
    model, deployment = load_pair(options)
    prompts = [parse_prompt(prompt) for prompt in options.prompts]
    settings: GenerateOptions = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
    }
    with launch(model, deployment, progress=ProgressLine()) as server:
        for prompt in prompts:
            print(prompt, end="" if model.tokenizer else " ->", flush=True)
            for delta in server.stream(prompt, **settings):
                ids = "".join(f" {token_id}" for token_id in delta.token_ids)
                print(delta.text if model.tokenizer else ids, end="", flush=True)
            print()
    return 0
