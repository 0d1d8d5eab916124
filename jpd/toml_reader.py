"""Reads a TOML file as typed tables and collects everything that is wrong with it.

Knows no key of any file: `jpd.config` says which keys there are. A getter never raises on a bad
value: it notes a Problem and gives the default, so that one run finds every fault of the file.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar, get_args

from jpd.errors import ConfigError, Problem

Default = TypeVar("Default")


def read_toml(path: Path) -> Mapping[str, object]:
    """The parsed file. Raises ConfigError when it is missing, not UTF-8 or malformed."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError([Problem(str(path), "file", path.name, reason)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), "file", path.name, "is not UTF-8 text")]) from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(
            [Problem(str(path), "file", path.name, "is nested too deeply")]
        ) from error
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        lines = text.splitlines() or [""]
        line = int(found.group(1)) if found else len(lines)
        shown = lines[min(line, len(lines)) - 1].strip()
        problem = Problem(str(path), f"line {line}", shown, f"not valid TOML: {error}")
        raise ConfigError([problem]) from error


class Table:
    """One table of a file. Each getter takes a key once; `close` reports the keys nobody asked for.

    All tables of a file share one list of problems, which the getters append to.
    """

    def __init__(self, file: str, key: str, values: object, problems: list[Problem]) -> None:
        self._file, self._key, self._problems = file, key, problems
        self._known: list[str] = []
        self._values: Mapping[str, object] = {}
        if isinstance(values, Mapping):
            self._values = values
        else:
            self.problem("", values, "must be a table")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def key(self, name: str) -> str:
        """The key as an operator finds it in the file, e.g. `worker[1].mesh.tensor`."""
        return ".".join(part for part in (self._key, name) if part)

    def problem(self, name: str, value: object, rule: str) -> None:
        self._problems.append(Problem(self._file, self.key(name), value, rule))

    def value(self, name: str) -> object | None:
        self._known.append(name)
        return self._values.get(name)

    def integer(
        self, name: str, default: Default, low: int = 0, high: int = 1 << 31
    ) -> int | Default:
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.problem(name, value, "must be an integer")
        elif not low <= value <= high:
            self.problem(name, value, _range_rule(low, high))
        else:
            return value
        return default

    def number(
        self,
        name: str,
        default: Default,
        low: float = 0.0,
        high: float = 1e12,
        above: bool = False,
    ) -> float | Default:
        """A finite number between low and high; `above`: low itself is excluded."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.problem(name, value, "must be a number")
        elif not math.isfinite(value):
            self.problem(name, value, "must be a finite number")
        elif not low <= value <= high or (above and value == low):
            self.problem(name, value, _range_rule(low, high, above))
        else:
            return float(value)
        return default

    def text(self, name: str, default: Default, pattern: str = r".+") -> str | Default:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self.problem(name, value, "must be a string")
        elif not re.fullmatch(pattern, value):
            self.problem(name, value, f"must match {pattern}")
        else:
            return value
        return default

    def choice(self, name: str, default: Default, literal: object) -> str | Default:
        """One of the strings of a `Literal` type or of a sequence."""
        value = self.value(name)
        allowed = tuple(literal) if isinstance(literal, Sequence) else get_args(literal)
        if value is None or value in allowed:
            return default if value is None else str(value)
        self.problem(
            name, value, f"must be one of {', '.join(allowed)}{_did_you_mean(value, allowed)}"
        )
        return default

    def boolean(self, name: str, default: bool) -> bool:
        value = self.value(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problem(name, value, "must be true or false")
        return default

    def integers(self, name: str, low: int = 0, high: int = 1 << 31) -> tuple[int, ...]:
        """A list of integers; () when absent or wrong."""
        value = self.value(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(_is_int(item) for item in value):
            self.problem(name, value, "must be a list of integers")
        elif not all(low <= item <= high for item in value):
            self.problem(name, value, f"every number {_range_rule(low, high)}")
        else:
            return tuple(value)
        return ()

    def required(self, name: str, what: str) -> None:
        """Notes a problem when the key is absent."""
        if name not in self._values:
            self.problem(name, None, f"is missing: {what}")

    def table(self, name: str) -> "Table":
        """A sub-table; empty when absent."""
        value = self.value(name)
        return Table(self._file, self.key(name), {} if value is None else value, self._problems)

    def tables(self, name: str) -> list["Table"]:
        """An array of tables (`[[name]]`); [] when absent."""
        value = self.value(name)
        if value is None:
            return []
        if not isinstance(value, list):
            self.problem(name, value, f"must be an array of tables: write [[{self.key(name)}]]")
            return []
        keys = (f"{self.key(name)}[{index}]" for index in range(len(value)))
        return [
            Table(self._file, key, item, self._problems)
            for key, item in zip(keys, value, strict=True)
        ]

    def close(self) -> None:
        """Notes every key that no getter asked for."""
        for name, value in self._values.items():
            if name not in self._known:
                known = ", ".join(sorted(self._known))
                hint = _did_you_mean(name, self._known) or f"; known keys: {known}"
                self.problem(name, value, f"unknown key{hint}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _range_rule(low: float, high: float, above: bool = False) -> str:
    lower = f"above {low:g}" if above else f"at least {low:g}"
    return f"must be {lower}" if high >= 1 << 31 else f"must be {lower} and at most {high:g}"


def _did_you_mean(value: object, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(value), known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
