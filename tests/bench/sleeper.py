"""Peers for tests of their processes; a module that is imported fast, for every process does."""

import os
import time

from jpd.errors import ConfigError, Problem


class Sleeper:
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def fail(self) -> None:
        raise ValueError("no such thing")


def refuse() -> Sleeper:
    raise ConfigError([Problem("file", "field", 1, "must be 2")])
