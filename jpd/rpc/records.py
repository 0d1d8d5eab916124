"""Frozen dataclasses as bytes between processes, by their type hints alone.

A new field travels without a line here, as long as its kind is known; one of an unknown kind is a
TypeError naming it, which a test of the messages finds. What is read is of the kinds that the hints
say, so that nothing else gets to a worker's thread. Both ends must have the same fields: they
compare PROTOCOL_VERSION and fingerprints first. Knows no message. Used by services and launchers.
"""

import base64
import enum
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from jpd.errors import JpdError

MONOTONIC = "time.monotonic seconds"

Moment = Annotated[float, MONOTONIC]
"""A time of the process's own clock: `load` moves it to the reader's clock."""

Record = TypeVar("Record")


class RecordError(JpdError):
    """Bytes that are not a record of the kind that was expected."""


@dataclass(frozen=True, slots=True)
class _Codec:
    """Value → what JSON can hold, and back; the float is what a Moment is moved by."""

    write: Callable[[Any], Any]
    read: Callable[[Any, float], Any]
    plain: frozenset[type] = frozenset()  # if values travel as they are: of which types


_PLAIN: Mapping[Any, frozenset[type]] = {
    str: frozenset((str,)),
    int: frozenset((int,)),
    float: frozenset((float, int)),
    bool: frozenset((bool,)),
    types.NoneType: frozenset((types.NoneType,)),
}


def dump(record: object) -> bytes:
    """The record as bytes. Raises TypeError for a class with a field of an unknown kind."""
    kind: Any = type(record)
    return json.dumps(codec_of(kind).write(record), separators=(",", ":")).encode()


def load(data: bytes, kind: type[Record], clock_offset: float = 0.0) -> Record:
    """The record in these bytes; `clock_offset` = reader's clock − writer's. Raises RecordError."""
    hint: Any = kind
    try:
        return cast(Record, codec_of(hint).read(json.loads(data), clock_offset))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"not a {kind.__name__}: {error!r}") from error


@cache
def codec_of(kind: Any) -> _Codec:
    """How values of this type hint travel. Raises TypeError when they cannot."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated and MONOTONIC in inner[1:]:
        return _Codec(_same, _read_moment)
    if origin is Annotated:
        return codec_of(inner[0])
    if kind in _PLAIN:
        return _plain(_PLAIN[kind])
    if origin is Literal:
        return _Codec(_same, lambda value, offset: inner[inner.index(value)])
    if kind is bytes:
        return _Codec(
            lambda value: base64.b64encode(value).decode(),
            lambda value, offset: base64.b64decode(value, validate=True),
        )
    if origin is tuple or origin is frozenset:
        return _collection(kind, origin, inner)
    if isinstance(origin, type) and issubclass(origin, Mapping) and inner[0] is str:
        return _mapping(codec_of(inner[1]))
    if origin in (Union, types.UnionType):
        return _union(kind, inner)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _Codec(lambda value: value.value, lambda value, offset: kind(value))
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind)
    raise TypeError(f"{kind} cannot travel: its kind is unknown to {__name__}")


def _same(value: Any) -> Any:
    return value


def _read_moment(value: Any, offset: float) -> float:
    if type(value) not in _PLAIN[float] or value != value:
        raise TypeError(f"{value!r:.40} is no time")
    return float(value) + offset


def _plain(kinds: frozenset[type]) -> _Codec:
    def read(value: Any, offset: float) -> Any:
        _check_kinds((value,), kinds)
        return value

    return _Codec(_same, read, kinds)


def _check_kinds(values: Any, kinds: frozenset[type]) -> None:
    """Raises TypeError. Quick: a prompt has thousands of values."""
    odd = set(map(type, values)) - kinds
    if odd:
        names = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(f"a {odd.pop().__name__} instead of {names}")


def _collection(kind: Any, origin: Any, inner: tuple[Any, ...]) -> _Codec:
    if origin is tuple and inner[-1] is not Ellipsis:
        codecs = [codec_of(item) for item in inner]
        return _Codec(
            lambda value: [c.write(v) for c, v in zip(codecs, value, strict=True)],
            lambda value, offset: tuple(
                c.read(v, offset) for c, v in zip(codecs, value, strict=True)
            ),
        )
    item = codec_of(inner[0])

    def read(value: Any, offset: float) -> Any:
        _check_kinds((value,), frozenset((list,)))
        if item.plain:  # thousands of token ids
            _check_kinds(value, item.plain)
            return origin(value)
        return origin(item.read(v, offset) for v in value)

    return _Codec(lambda value: [item.write(v) for v in value], read)


def _mapping(item: _Codec) -> _Codec:
    return _Codec(
        lambda value: {key: item.write(v) for key, v in value.items()},
        lambda value, offset: {key: item.read(v, offset) for key, v in value.items()},
    )


def _union(kind: Any, inner: tuple[Any, ...]) -> _Codec:
    """Something or None; or several kinds that JSON itself tells apart."""
    codecs = [codec_of(item) for item in inner if item is not types.NoneType]
    if len(codecs) == 1:
        codec = codecs[0]
        return _Codec(
            lambda value: None if value is None else codec.write(value),
            lambda value, offset: None if value is None else codec.read(value, offset),
        )
    if all(codec.plain for codec in codecs):
        return _plain(frozenset().union(*(codec_of(item).plain for item in inner)))
    raise TypeError(f"{kind} cannot travel: which of its kinds it is would not be known")


def _dataclass(kind: Any) -> _Codec:
    hints = get_type_hints(kind, include_extras=True)
    codecs: dict[str, _Codec] = {}
    for field in fields(kind):
        try:
            codecs[field.name] = codec_of(hints[field.name])
        except TypeError as error:
            raise TypeError(f"{kind.__name__}.{field.name}: {error}") from error

    def write(value: Any) -> dict[str, Any]:
        assert type(value) is kind, f"{value!r} is not a {kind.__name__}"
        return {name: codec.write(getattr(value, name)) for name, codec in codecs.items()}

    def read(value: Any, offset: float) -> Any:
        if value.keys() != codecs.keys():
            odd = ", ".join(sorted(value.keys() ^ codecs.keys()))
            raise ValueError(f"fields of {kind.__name__} on one side only: {odd}")
        return kind(**{name: codec.read(value[name], offset) for name, codec in codecs.items()})

    return _Codec(write, read)
