"""What a guided answer must match: one frozen value, whatever field of whichever API asked for it.

Checked as far as plain Python can; whether a schema or a regular expression can be followed is
found by `jpd.guidance` when it is compiled. Read by the frontends, carried by SamplingParams.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from jpd.errors import RequestError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "answer_or_calls"]

MAX_GRAMMAR_CHARS = 1 << 16
MAX_CHOICES = 1024
MAX_SCHEMA_DEPTH = 100
"""The compiler reads 128 levels, some of which are those around the arguments of a call."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is the schema as JSON, the expression, the choices as a JSON list, or see CallMarks.

    Two with the same kind and text are equal, wherever in a request they stood.
    """

    kind: GrammarKind
    text: str = ""
    field: str = dataclasses.field(default="response_format", compare=False)  # named by errors


def json_object_grammar(field: str) -> Grammar:
    """Any JSON object."""
    return Grammar("json_object", field=field)


def json_schema_grammar(field: str, schema: object, max_depth: int = MAX_SCHEMA_DEPTH) -> Grammar:
    """`schema` is an object, or its JSON as text. Raises RequestError naming `field`."""
    if isinstance(schema, str):
        shown = schema
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(field, shown, f"must be a JSON schema: {error}") from None
    if not isinstance(schema, Mapping):
        raise RequestError(field, schema, "must be a JSON schema: an object")
    if is_deeper(schema, max_depth):
        rule = f"must be a JSON schema of at most {max_depth} levels of objects and lists"
        raise RequestError(field, "...", rule)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(field, "...", f"must be a JSON schema: {error}") from None
    return Grammar("json_schema", _check_text(field, text), field)


def is_deeper(value: object, num_levels: int) -> bool:
    """Whether there are more levels of objects and lists. Level by level: no stack to overflow."""
    level = _containers([value])
    for _ in range(num_levels):
        level = [inner for outer in level for inner in _containers(outer)]
    return bool(level)


def _containers(value: Iterable[object]) -> list[Iterable[object]]:
    """Objects and lists right inside an object or a list."""
    inner = value.values() if isinstance(value, Mapping) else value
    return [item for item in inner if isinstance(item, Mapping | list | tuple)]


def regex_grammar(field: str, pattern: object) -> Grammar:
    """An expression that the whole answer must match. Raises RequestError naming `field`."""
    if not isinstance(pattern, str) or not pattern:
        raise RequestError(field, pattern, "must be a regular expression: a non-empty text")
    return Grammar("regex", _check_text(field, pattern), field)


def choice_grammar(field: str, choices: object) -> Grammar:
    """Texts of which the answer is one. Raises RequestError naming `field`."""
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes) or not choices:
        raise RequestError(field, choices, "must be a non-empty list of texts")
    if len(choices) > MAX_CHOICES:
        raise RequestError(field, len(choices), f"at most {MAX_CHOICES} choices")
    for position, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise RequestError(f"{field}[{position}]", choice, "must be a non-empty text")
    text = json.dumps(list(choices), ensure_ascii=False)
    return Grammar("choice", _check_text(field, text), field)


@dataclass(frozen=True, slots=True)
class CallMarks:
    """What stands around a call of a function, and between two of them."""

    opens: str
    closes: str
    separator: str
    is_parallel: bool  # several calls may be made


def answer_or_calls_grammar(answer: Grammar, call_schema: object, marks: CallMarks) -> Grammar:
    """What `answer` allows, or calls, each of which is an object of the schema between its marks.

    Its text is a JSON object of kind and text of the answer, the schema, and the marks. Raises
    RequestError naming the field of the answer.
    """
    parts = {"kind": answer.kind, "text": answer.text, "call": call_schema, **asdict(marks)}
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    return Grammar("answer_or_calls", _check_text(answer.field, text), answer.field)


def _check_text(field: str, text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(field, text, f"must have at most {MAX_GRAMMAR_CHARS} characters")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[error.start : error.end]
        raise RequestError(field, shown, "is not valid Unicode (lone surrogate)") from None
    return text
