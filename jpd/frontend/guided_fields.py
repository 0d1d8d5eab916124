"""The fields by which clients ask for a guided answer → one Grammar.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_json`, `guided_regex`
and `guided_choice`. Called by `job.read_sampling` for every door. Whether a schema or an expression
can be followed is found later, by the compiler.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jpd.errors import RequestError
from jpd.grammar import (
    Grammar,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)

GUIDED_NAMES = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
)

Reader = Callable[[str, object], Grammar | None]


def read_grammar(fields: Mapping[str, object]) -> Grammar | None:
    """What the fields of GUIDED_NAMES ask for. Raises RequestError, also when two of them do."""
    found = [
        grammar
        for name in GUIDED_NAMES
        if (value := fields.get(name)) is not None
        and (grammar := _READERS[name](name, value)) is not None
    ]
    if len(found) > 1:
        rule = f"cannot be given together with {found[0].field}"
        raise RequestError(found[1].field, "...", rule)
    return found[0] if found else None


def _response_format(field: str, value: object) -> Grammar | None:
    kind = _table(field, value).get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            return json_object_grammar(field)
        case "json_schema":
            inner = f"{field}.json_schema"
            wanted = _table(inner, _table(field, value).get("json_schema"))
            return json_schema_grammar(f"{inner}.schema", wanted.get("schema"))
        case _:
            rule = "must be text, json_object or json_schema"
            raise RequestError(f"{field}.type", kind, rule)


def _structured_outputs(field: str, value: object) -> Grammar | None:
    given = _table(field, value)
    asked = {key: item for key, item in given.items() if item is not None and item is not False}
    for key, item in asked.items():
        if key not in _STRUCTURED:
            raise RequestError(f"{field}.{key}", item, "is not supported by this server")
    if len(asked) > 1:
        raise RequestError(field, sorted(asked), "must ask for one thing only")
    for key, item in asked.items():
        return _STRUCTURED[key](f"{field}.{key}", item)
    return None


def _table(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(field, value, "must be an object")
    return value


def _any_object(field: str, value: object) -> Grammar:
    if value is not True:
        raise RequestError(field, value, "must be true or false")
    return json_object_grammar(field)


_STRUCTURED: Mapping[str, Reader] = {
    "json": json_schema_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "json_object": _any_object,
}

_READERS: Mapping[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": json_schema_grammar,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
}
