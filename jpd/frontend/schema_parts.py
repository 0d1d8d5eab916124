"""Fields of bodies that /openapi.json must describe by hand, and the bounds of the others.

What is read from them is checked in `job`, `prompts`, `messages`, `tool_fields` and `grammar`; the
limits told here are theirs. Used by `schemas`.
"""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from jpd.frontend.job import MAX_ID_CHARS, MAX_STOP_CHARS, MAX_STOPS
from jpd.frontend.prompts import MAX_PROMPTS
from jpd.frontend.tool_fields import MAX_TOOLS, TOOL_NAME
from jpd.grammar import MAX_CHOICES
from jpd.request import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS

Schema = dict[str, Any]


def number(low: float, high: float, description: str | None = None) -> Any:
    """A field that may be absent, with bounds that are told here and checked elsewhere."""
    bounds: Schema = {"minimum": low, "maximum": high}
    return Field(None, description=description, json_schema_extra=bounds)


def name(description: str) -> Any:
    """An id that may be absent."""
    lengths: Schema = {"minLength": 1, "maxLength": MAX_ID_CHARS}
    return Field(None, description=description, json_schema_extra=lengths)


def _any_of(*schemas: Schema, description: str | None = None) -> WithJsonSchema:
    told = {} if description is None else {"description": description}
    return WithJsonSchema({"anyOf": list(schemas)} | told)


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(items: Schema, most: int | None = None, least: int = 0) -> Schema:
    limits = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least} | limits


_NULL: Schema = {"type": "null"}
_STRING: Schema = {"type": "string"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKEN_ID: Schema = {
    "type": "integer",
    "minimum": 0,
    "description": "below the size of the vocabulary",
}
_TOKEN_IDS = _list(_TOKEN_ID, least=1)
_SCHEMA: Schema = {"type": "object", "description": "A JSON schema."}
_SCHEMA_OR_TEXT: Schema = {"anyOf": [_SCHEMA, _TEXT | {"description": "Its JSON."}]}
_CHOICES = _list(_TEXT, MAX_CHOICES, 1)

PromptField = Annotated[
    Any,
    _any_of(
        _TEXT,
        _TOKEN_IDS,
        _list(_TEXT, MAX_PROMPTS, 1),
        _list(_TOKEN_IDS, MAX_PROMPTS, 1),
        description="A text, token ids, or a list of texts or of lists of token ids.",
    ),
]

_PARTS = _list(_object(("type", "text"), type={"const": "text"}, text=_STRING), least=1)
_CONTENT: Schema = {"anyOf": [_STRING, _PARTS]}
_ARGUMENTS: Schema = {"anyOf": [_STRING | {"description": "JSON"}, {"type": "object"}]}
_CALL = _object(
    ("id", "function"),
    id=_TEXT,
    type={"const": "function"},
    function=_object(("name", "arguments"), name=_TEXT, arguments=_ARGUMENTS),
)


def _message(roles: list[str], required: tuple[str, ...], **properties: Schema) -> Schema:
    every: dict[str, Schema] = {"role": {"enum": roles}, "name": {"anyOf": [_STRING, _NULL]}}
    found = _object(("role", *required), **every, **properties)
    return found | {"additionalProperties": False}


_MESSAGES = _list(
    {
        "anyOf": [
            _message(["system", "developer", "user"], ("content",), content=_CONTENT),
            _message(["assistant"], ("content",), content=_CONTENT),
            _message(
                ["assistant"],
                ("tool_calls",),
                content={"anyOf": [_CONTENT, _NULL]},
                tool_calls=_list(_CALL, least=1),
            ),
            _message(["tool"], ("content", "tool_call_id"), content=_CONTENT, tool_call_id=_TEXT),
        ]
    },
    least=1,
)
MessagesField = Annotated[Any, WithJsonSchema(_MESSAGES)]
MaybeMessagesField = Annotated[Any, _any_of(_MESSAGES, _NULL)]

_FUNCTION = _object(
    ("name",),
    name={"type": "string", "pattern": f"^{TOOL_NAME}$"},
    description={"anyOf": [_STRING, _NULL]},
    parameters={"anyOf": [_SCHEMA, _NULL]},
)
_NAMED_FUNCTION = _object(("name",), name=_TEXT)
ToolsField = Annotated[
    Any,
    _any_of(
        _list(_object(("type", "function"), type={"const": "function"}, function=_FUNCTION))
        | {"maxItems": MAX_TOOLS},
        _NULL,
        description="functions that the model may call, each name once",
    ),
]
ToolChoiceField = Annotated[
    Any,
    _any_of(
        {"enum": ["none", "auto", "required"]},
        _object(("type", "function"), type={"const": "function"}, function=_NAMED_FUNCTION),
        _NULL,
        description="auto unless given; required and a function by name hold by a grammar",
    ),
]

_STOP = _TEXT | {"maxLength": MAX_STOP_CHARS}
StopField = Annotated[Any, _any_of(_STOP, _list(_STOP, MAX_STOPS), _NULL)]
StopTokenIdsField = Annotated[Any, _any_of(_list(_TOKEN_ID, MAX_STOP_TOKEN_IDS), _NULL)]
TokensField = Annotated[Any, WithJsonSchema(_list(_TOKEN_ID))]

ResponseFormatField = Annotated[
    Any,
    _any_of(
        _object(("type",), type={"enum": ["text", "json_object"]}),
        _object(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=_object(("schema",), name=_STRING, schema=_SCHEMA),
        ),
        _NULL,
    ),
]
StructuredOutputsField = Annotated[
    Any,
    _any_of(
        {
            "type": "object",
            "additionalProperties": False,
            "maxProperties": 1,
            "properties": {
                "json": _SCHEMA_OR_TEXT,
                "regex": _TEXT,
                "choice": _CHOICES,
                "json_object": {"type": "boolean"},
            },
        },
        _NULL,
        description="One of these.",
    ),
]
GuidedJsonField = Annotated[Any, _any_of(_SCHEMA_OR_TEXT, _NULL)]
GuidedChoiceField = Annotated[Any, _any_of(_CHOICES, _NULL)]
LogitBiasField = Annotated[
    Any,
    _any_of(
        {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIASES,
        },
        _NULL,
        description="token ids → what is added to their logits",
    ),
]
