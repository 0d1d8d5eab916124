"""What the arguments of a command must be: argparse's types of numbers, and files to be written.

A wrong one is told before anything is loaded. Knows no command. Used by the `cli_` modules.
"""

import argparse
from pathlib import Path

from jpd.errors import ConfigError, Problem

MOST = 1e9
"""As seconds: beyond it timers of the operating system overflow."""


def port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError("must be a port: between 0 and 65535")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"must be at least 0 and at most {MOST:g}")
    return value


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def amount(text: str) -> float:
    value = float(text)
    if not 0 < value <= MOST:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {MOST:g}")
    return value


def check_writable(path: Path, command: str, argument: str) -> None:
    """Learn now that the file cannot be written; leaves none behind. Raises ConfigError."""
    is_new = not path.exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        raise ConfigError([Problem(command, argument, str(path), rule)]) from error
