"""`jpd generate`: launch the pair, continue the prompts, print the text as it comes."""

import argparse

from jpd.api import launch
from jpd.cli_pair import add_pair_arguments, load_pair, parse_prompt
from jpd.cli_progress import ProgressLine
from jpd.frontend.job import check_fits
from jpd.frontend.prompts import encode, read_prompts
from jpd.frontend.served_model import served_model
from jpd.request import SamplingParams

HELP = "continue prompts and print the text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pair_arguments(parser, answers_people=True)
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of sampling; default: a new one")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text, or ids as [1, 2, 3]")


def run(options: argparse.Namespace) -> int:
    sampling = SamplingParams(
        max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
    )
    prompts = read_prompts([parse_prompt(prompt) for prompt in options.prompts])
    model, deployment = load_pair(options, generation_config=options.generation_config)
    served = served_model(model, deployment)
    for encoded in encode(prompts, served, add_special_tokens=True):
        check_fits(encoded, sampling, served)  # now, not after the weights are loaded
    with launch(model, deployment, progress=ProgressLine()) as server:
        for prompt in prompts:
            shown = prompt if isinstance(prompt, str) else f"{list(prompt)} ->"
            print(shown, end="", flush=True)
            for delta in server.stream(
                prompt,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                seed=sampling.seed,
            ):
                ids = "".join(f" {token_id}" for token_id in delta.token_ids)
                print(delta.text if model.tokenizer else ids, end="", flush=True)
            print()
    return 0
