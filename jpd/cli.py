"""The `jpd` command: picks the command, turns errors into exit codes.

0 done · 1 a check did not hold or the server failed · 2 the input is wrong (every problem on
stderr) · 130 interrupted. Each command is a module of its own with `add_arguments` and `run`.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import shtab

from jpd import (
    cli_bench,
    cli_check,
    cli_convert,
    cli_explore,
    cli_generate,
    cli_serve,
    cli_verify,
    cli_workers,
)
from jpd.errors import ConfigError, JpdError, RequestError


class Command(Protocol):
    """What each module of a command has."""

    @property
    def __name__(self) -> str: ...

    @property
    def HELP(self) -> str: ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


EXIT_CODES = (
    "Exit status: 0 done; 1 a check did not hold or the server failed; "
    "2 the input is wrong; 130 interrupted."
)

COMMANDS: tuple[Command, ...] = (
    cli_check,
    cli_serve,
    cli_workers,
    cli_generate,
    cli_verify,
    cli_convert,
    cli_bench,
    cli_explore,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. What the user did wrong never shows a traceback."""
    options = build_parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except ConfigError as error:
        return _fail(2, *error.problems)
    except RequestError as error:
        return _fail(2, error)
    except JpdError as error:
        return _fail(1, error)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except BrokenPipeError:  # the reader of our output went away, as in `jpd check | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a name that is too long: nothing we could have known
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(1, f"{where}{error.strerror or error}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jpd",
        description="Serve large language models from JAX, prefill and decode on separate meshes.",
        epilog=EXIT_CODES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        name = module.__name__.rpartition("_")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    parser.add_argument(
        "--print-completion",
        action=shtab.completion_action(),
        choices=shtab.SUPPORTED_SHELLS,
        metavar="SHELL",
        help="print what makes SHELL complete these commands",
    )
    return parser


def _fail(status: int, *messages: object) -> int:
    for message in messages:
        print(f"jpd: {message}", file=sys.stderr)
    return status
