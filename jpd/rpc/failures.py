"""Errors of jpd's tree as bytes, so that a remote call raises what a local one would.

Any class below JpdError travels by its name and its constructor's arguments; what is not of the
tree arrives as a WorkerLostError of the worker that was asked.
"""

import inspect
import json
from collections.abc import Iterator

from jpd.errors import ConfigError, JpdError, Problem, WorkerLostError

MAX_VALUE_CHARS = 1000
MAX_ITEMS = 32


def dump_error(error: BaseException, worker: str) -> bytes:
    """The error as bytes; `worker` is blamed when it is not one of jpd's own."""
    if not isinstance(error, JpdError):
        error = WorkerLostError(worker, f"{type(error).__name__}: {error}")
    return json.dumps([type(error).__name__, _arguments(error)]).encode()


def load_error(data: bytes, worker: str) -> JpdError:
    """The error in these bytes."""
    try:
        name, arguments = json.loads(data)
        kind = _classes()[name]
        if kind is ConfigError:
            return ConfigError([Problem(*problem) for problem in arguments])
        return kind(*arguments)
    except (ValueError, KeyError, TypeError) as error:
        return WorkerLostError(worker, f"it failed, and how cannot be read: {error!r}")


def _arguments(error: JpdError) -> list[object]:
    if isinstance(error, ConfigError):
        return [[p.file, p.key, _plain(p.value), p.rule] for p in error.problems]
    if type(error).__init__ is Exception.__init__:
        return [_plain(argument) for argument in error.args]
    names = list(inspect.signature(type(error).__init__).parameters)[1:]
    return [_plain(getattr(error, name)) for name in names]


def _plain(value: object) -> object:
    """Only for show: numbers, short texts and lists as they are, the rest as it prints."""
    if isinstance(value, list | tuple) and len(value) <= MAX_ITEMS:
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | None):
        return value[:MAX_VALUE_CHARS] if isinstance(value, str) else value
    return repr(value)[:MAX_VALUE_CHARS]


def _classes() -> dict[str, type[JpdError]]:
    return {kind.__name__: kind for kind in _below(JpdError)}


def _below(kind: type[JpdError]) -> Iterator[type[JpdError]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _below(inner)
