"""`--model M --mesh F`, as most commands take them: read both, report what is wrong with either."""

import argparse
import json
import sys
from typing import get_args

from rich.console import Console

from jpd.checkpoint.model_source import GenerationConfig, Model, open_model
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, Problem, RequestError
from jpd.mesh_file import load_deployment
from jpd.nn.config import WeightFormat

PIPE_WIDTH = 160
"""Columns of a report that goes to a file or another program."""


def add_pair_arguments(parser: argparse.ArgumentParser, *, answers_people: bool = False) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="a card of models/, a Hugging Face folder, an Orbax folder or a .gguf file",
    )
    parser.add_argument(
        "--mesh",
        required=True,
        metavar="F",
        help="a mesh file, or the name of one in mesh_configs/",
    )
    add_weights_argument(parser)
    if answers_people:
        parser.add_argument(
            "--generation-config",
            choices=get_args(GenerationConfig),
            default="auto",
            help="auto (the default): what requests leave out is as the model's "
            "generation_config.json recommends; off: jpd's own defaults",
        )


def add_weights_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        choices=get_args(WeightFormat),
        help="how matrices are held: int8 has one scale per output channel; default: as the card "
        "or the checkpoint has it",
    )


def load_pair(
    options: argparse.Namespace,
    *,
    need_weights: bool = True,
    chat_template: str | None = None,
    generation_config: GenerationConfig = "off",
) -> tuple[Model, DeploymentConfig]:
    """Open both. Raises ConfigError with the problems of both.

    What compares or measures takes no settings of the model's authors: it is given its own.
    """
    problems: list[Problem] = []
    deployment: DeploymentConfig | None = None
    model: Model | None = None
    try:
        deployment = load_deployment(options.mesh)
    except ConfigError as error:
        problems += error.problems
    try:
        model = open_model(
            options.model,
            chat_template=chat_template,
            weights=options.weights,
            generation_config=generation_config,
            need_weights=need_weights,
        )
    except ConfigError as error:
        problems += error.problems
    if model is None or deployment is None:
        raise ConfigError(problems)
    return model, deployment


def parse_prompt(text: str) -> str | list[int]:
    """Token ids when the text is a JSON list of them, else the text. Raises RequestError."""
    try:
        value = json.loads(text) if text.lstrip().startswith("[") else text
    except (ValueError, RecursionError):
        return text  # it happens to begin with a bracket
    if isinstance(value, list) and not all(type(item) is int for item in value):
        raise RequestError("prompt", text, "a list must hold token ids only")
    return value if isinstance(value, list) else text


def make_console() -> Console:
    """For reports on stdout: wide when nobody's terminal limits it."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
