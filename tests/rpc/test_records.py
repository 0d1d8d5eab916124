"""Every field of every message crosses between processes; a field that could not is found here."""

import dataclasses
import enum
import itertools
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from jpd import errors
from jpd.cache.prefix_log import PrefixChanges
from jpd.config import DeploymentConfig
from jpd.errors import ConfigError, JpdError, Problem, RequestError, WorkerLostError
from jpd.mesh_file import load_deployment
from jpd.request import SamplingParams
from jpd.rpc.failures import dump_error, load_error
from jpd.rpc.records import MONOTONIC, Moment, RecordError, codec_of, dump, load
from jpd.worker.fingerprint import Fingerprint
from jpd.worker.protocol import (
    Attempt,
    DecodeEvent,
    PrefillResult,
    Reservation,
    UnknownAttemptError,
    WorkerStatus,
)
from jpd.worker.service import Peers

MESSAGES = (
    *(Attempt, Reservation, PrefillResult, DecodeEvent, WorkerStatus),
    *(SamplingParams, Fingerprint, Peers, DeploymentConfig, PrefixChanges),
)
numbers = itertools.count(1)


def values_of(hint: Any) -> list[Any]:
    """Some values of a type hint, the unlike ones of a union each."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values_of(inner[0])
    if origin in (Union, types.UnionType):
        return [value for kind in inner for value in values_of(kind)]
    if origin is Literal:
        return list(inner)
    if origin is tuple and inner[-1] is Ellipsis:
        return [(), tuple(values_of(inner[0])) * 2]
    if origin is tuple:
        return [tuple(values_of(kind)[0] for kind in inner)]
    if origin is frozenset:
        return [frozenset(values_of(inner[0]))]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [{"a": values_of(inner[1])[0]}]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return list(hint)
    if dataclasses.is_dataclass(hint):
        return [example(hint)]
    plain: dict[Any, list[Any]] = {
        str: [f"text {next(numbers)} é"],
        int: [next(numbers)],
        float: [next(numbers) / 64, float("inf")],
        bool: [True, False],
        bytes: [b"\x00\xff", b""],
        types.NoneType: [None],
    }
    return plain[hint]


SENSIBLE: dict[Any, dict[str, Any]] = {
    SamplingParams: {
        "temperature": 0.5,
        "top_p": 0.75,
        "min_p": 0.25,
        "min_tokens": 1,
        "max_tokens": 7,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logprobs": 3,
        "prompt_logprobs": 0,
        "num_speculative_tokens": 4,
    }
}
"""Fields of classes that refuse most values."""


def example(kind: Any) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    return kind(
        **{
            field.name: SENSIBLE.get(kind, {}).get(field.name, values_of(hints[field.name])[0])
            for field in dataclasses.fields(kind)
        }
    )


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_field_of_every_message_comes_back(kind: Any) -> None:
    hints = get_type_hints(kind, include_extras=True)
    record = example(kind)
    assert load(dump(record), kind) == record
    for field in dataclasses.fields(kind):
        for value in values_of(hints[field.name]):
            if field.name not in SENSIBLE.get(kind, {}) and not dataclasses.is_dataclass(value):
                other = dataclasses.replace(record, **{field.name: value})
                back = getattr(load(dump(other), kind), field.name)
                assert back == value and type(back) is type(value), field.name


@pytest.mark.parametrize("kind", (Attempt, Reservation, PrefillResult, DecodeEvent, WorkerStatus))
def test_times_of_a_clock_are_moments(kind: Any) -> None:
    """A field named as a time or a deadline must be moved to the reader's clock."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name.endswith(("_time", "deadline")):
            assert MONOTONIC in str(hint), f"{kind.__name__}.{name} is not a Moment"


def test_moments_move_to_the_clock_of_the_reader() -> None:
    attempt = dataclasses.replace(example(Attempt), deadline=100.0)
    assert load(dump(attempt), Attempt, clock_offset=-7.5).deadline == 92.5
    endless = dataclasses.replace(attempt, deadline=float("inf"))
    assert load(dump(endless), Attempt, clock_offset=-7.5).deadline == float("inf")
    event = DecodeEvent("a", (1, 2), kv_complete_time=3.0)
    assert load(dump(event), DecodeEvent, clock_offset=2.0).kv_complete_time == 5.0
    assert load(dump(DecodeEvent("a", ())), DecodeEvent, clock_offset=2.0) == DecodeEvent("a", ())


def test_a_mesh_file_comes_back_whole(repo: Any) -> None:
    for path in sorted((repo / "mesh_configs").glob("*.toml")):
        deployment = load_deployment(path)
        assert load(dump(deployment), DeploymentConfig) == deployment


def test_a_field_of_an_unknown_kind_is_named() -> None:
    @dataclass(frozen=True)
    class Strange:
        good: int
        bad: complex

    with pytest.raises(TypeError, match=r"Strange\.bad: <class 'complex'>"):
        codec_of(Strange)

    @dataclass(frozen=True)
    class Ambiguous:
        either: bytes | str

    with pytest.raises(TypeError, match=r"Ambiguous\.either"):
        codec_of(Ambiguous)


@dataclass(frozen=True)
class Older:
    name: str


@dataclass(frozen=True)
class Newer:
    name: str
    when: Moment


@pytest.mark.parametrize("data", [b"", b"[1]", b'{"name": "x"}', b"\xff", dump(Older("x"))])
def test_what_is_no_record_of_the_kind_is_refused(data: bytes) -> None:
    with pytest.raises(RecordError, match="Newer"):
        load(data, Newer)


ERRORS: list[JpdError] = [
    RequestError("max_tokens", 7, "must be less"),
    errors.ModelNotFoundError("model", "x", "is not here"),
    errors.OverloadedError("full", 3.0),
    errors.DeadlineError("passed"),
    errors.RequestCancelledError("gone"),
    errors.WorkerError("decode-0", "no"),
    WorkerLostError("decode-0", "dead"),
    errors.TransferError("decode-0", "late"),
    UnknownAttemptError("decode-0", "who"),
    ConfigError(
        [Problem("f.toml", "key", [3, 4], "rule"), Problem("f.toml", "other", None, "rule")]
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_back_as_what_they_were(error: JpdError) -> None:
    back = load_error(dump_error(error, "w"), "w")
    assert type(back) is type(error) and str(back) == str(error)
    assert vars(back) == vars(error)


def test_an_error_of_nobody_is_the_workers() -> None:
    back = load_error(dump_error(ZeroDivisionError("oh"), "decode-0"), "decode-0")
    assert isinstance(back, WorkerLostError) and back.worker == "decode-0"
    assert "ZeroDivisionError: oh" in back.reason
    assert isinstance(load_error(b'["Nonsense", []]', "decode-0"), WorkerLostError)
    assert isinstance(load_error(b"\xff", "decode-0"), WorkerLostError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("attempt_id", {"a": 1}), ("attempt_id", None), ("priority", True), ("priority", 1.5)),
        *(("token_ids", "abc"), ("token_ids", {"1": 2}), ("token_ids", [1, "a"])),
        *(("token_ids", [[1]]), ("deadline", "soon"), ("deadline", float("nan"))),
        *(("cache_salt", 5), ("sampling", None), ("sampling", [])),
    ],
)
def test_a_value_of_another_kind_is_refused_where_it_is_read(field: str, value: object) -> None:
    """Further on, on a worker's thread, it would be the end of the worker."""
    whole = json.loads(dump(Attempt("a", (1, 2), SamplingParams(), ())))
    assert load(json.dumps(whole).encode(), Attempt).token_ids == (1, 2)
    with pytest.raises(RecordError, match="not a Attempt"):
        load(json.dumps(whole | {field: value}).encode(), Attempt)


def test_a_record_that_is_too_deep_is_refused() -> None:
    with pytest.raises(RecordError):
        load(b"[" * 100_000, Attempt)
