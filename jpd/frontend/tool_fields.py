"""`tools`, `tool_choice` and `parallel_tool_calls` → what the template is told, and what to find.

`required` and a function by name are kept by a grammar: a JSON list of calls, or the arguments of
the one function. Knows the rules of fields, no transport. Called by the doors.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jpd.errors import RequestError
from jpd.frontend.prompts import ServedModel
from jpd.frontend.tool_calls import ToolUse
from jpd.frontend.tool_formats import FORMATS, GUIDED_LIST, ToolFormat
from jpd.grammar import (
    MAX_SCHEMA_DEPTH,
    CallMarks,
    Grammar,
    answer_or_calls_grammar,
    json_schema_grammar,
)
from jpd.request import SamplingParams

MAX_TOOLS = 128
LIST_DEPTH = 6
"""Levels around the parameters of a function in a list of calls."""
TOOL_NAME = "[A-Za-z0-9_.-]{1,64}"
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "additionalProperties": False}

Tool = Mapping[str, Any]
"""As clients send them and templates want them: type, and function with name and parameters."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Functions that the model may call."""

    tools: tuple[Tool, ...]
    use: ToolUse
    grammar: Grammar | None = None  # what a call that must be made looks like


def read_tool_request(
    tools: object, choice: object, parallel: bool | None, model: ServedModel
) -> ToolRequest | None:
    """None when no function may be called. Raises RequestError."""
    offered = read_tools(tools)
    kind, name = _read_choice(choice, [tool["function"]["name"] for tool in offered])
    if kind == "none" or not offered:
        return None
    by_name = {tool["function"]["name"]: tool["function"] for tool in offered}
    names = frozenset(by_name)
    is_single = parallel is False
    native = model.tool_format
    if kind == "auto":
        if native is None:
            rule = (
                f"how {model.name!r} writes calls cannot be told from its chat template: start the "
                f"server with --tool-call-parser ({', '.join(FORMATS)}), or require a call"
            )
            raise RequestError("tools", f"{len(offered)} functions", rule)
        return ToolRequest(offered, ToolUse(names, native, is_single=is_single))
    if kind == "required":
        schema = _list_schema(tuple(by_name.values()), is_single)
        grammar = json_schema_grammar("tools", schema, MAX_SCHEMA_DEPTH + LIST_DEPTH)
        form = _with_ids_of(GUIDED_LIST, native)
        return ToolRequest(offered, ToolUse(names, form, is_single=is_single), grammar)
    position = list(by_name).index(name)
    field = f"tools[{position}].function.parameters"
    grammar = json_schema_grammar(field, _parameters(by_name[name]))
    form = _with_ids_of(GUIDED_LIST, native)
    return ToolRequest(offered, ToolUse(names, form, forced=name), grammar)


def read_tools(value: object) -> tuple[Tool, ...]:
    """The functions that are offered. Raises RequestError."""
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError("tools", value, "must be a list of functions")
    if len(value) > MAX_TOOLS:
        raise RequestError("tools", len(value), f"at most {MAX_TOOLS} functions")
    tools = tuple(_tool(f"tools[{index}]", item) for index, item in enumerate(value))
    names = set[str]()
    for index, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            raise RequestError(f"tools[{index}].function.name", name, "must not be given twice")
        names.add(name)
    return tools


def _tool(field: str, value: object) -> Tool:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        rule = 'must be an object like {"type": "function", "function": {"name": ...}}'
        raise RequestError(field, value, rule)
    if value.get("type") != "function":
        raise RequestError(f"{field}.type", value.get("type"), 'only "function" is supported')
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(TOOL_NAME, name):
        rule = "must have 1 to 64 letters, digits, dots, dashes or underscores"
        raise RequestError(f"{field}.function.name", name, rule)
    inner = f"{field}.function.parameters"
    json_schema_grammar(inner, _parameters(function))  # raises where it is none
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{field}.function.description", description, "must be a string")
    return value


def _parameters(function: Mapping[str, Any]) -> object:
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        return _NO_PARAMETERS
    return {"type": "object", **parameters} if isinstance(parameters, Mapping) else parameters


def _read_choice(value: object, names: Sequence[str]) -> tuple[str, str]:
    """none, auto or required, or "function" and its name. Raises RequestError."""
    if value is None:
        return "auto", ""
    if isinstance(value, Mapping):
        function = value.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if value.get("type") != "function" or not isinstance(name, str):
            rule = 'must be an object like {"type": "function", "function": {"name": ...}}'
            raise RequestError("tool_choice", value, rule)
        if name not in names:
            raise RequestError("tool_choice.function.name", name, "must be one of tools")
        return "function", name
    if not isinstance(value, str) or value not in ("none", "auto", "required"):
        rule = "must be none, auto, required or a function by its name"
        raise RequestError("tool_choice", value, rule)
    if value == "required" and not names:
        raise RequestError("tool_choice", value, "needs tools")
    return value, ""


def _list_schema(functions: Sequence[Mapping[str, Any]], is_single: bool) -> dict[str, Any]:
    """A list of calls, each of one of the functions."""
    call = _call_schema(functions, "arguments", "#/items")
    schema = {"type": "array", "minItems": 1, "items": call}
    return schema | ({"maxItems": 1} if is_single else {})


def _call_schema(
    functions: Sequence[Mapping[str, Any]], arguments: str, place: str
) -> dict[str, Any]:
    """A call of one of the functions. The schema stands at `place` of the whole."""
    calls = []
    for index, function in enumerate(functions):
        inner = f"{place}/anyOf/{index}/properties/{arguments}"
        properties = {
            "name": {"const": function["name"]},
            arguments: _moved(_parameters(function), inner),
        }
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}


def _moved(schema: Any, place: str) -> Any:
    """The schema as it stands at `place` of another: references into itself are longer there."""
    if isinstance(schema, list | tuple):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: place + item[1:]
        if key == "$ref" and isinstance(item, str) and item.startswith("#")
        else _moved(item, place)
        for key, item in schema.items()
    }


def _with_ids_of(form: ToolFormat, native: ToolFormat | None) -> ToolFormat:
    if native is None:
        return form
    return replace(form, id_prefix=native.id_prefix, num_id_digits=native.num_id_digits)


def with_grammar(sampling: SamplingParams, request: ToolRequest | None) -> SamplingParams:
    """Settings under which the calls that must be made are made. Raises RequestError."""
    if request is None:
        return sampling
    answer, form = sampling.grammar, request.use.format
    if answer is None:
        return replace(sampling, grammar=request.grammar)
    if request.grammar is not None:
        rule = "cannot be given together with a tool_choice by which there is no answer but a call"
        raise RequestError(answer.field, "...", rule)
    if not form.is_text:
        rule = "cannot be given together with tools: this model marks calls by a special token"
        raise RequestError(answer.field, "...", rule)
    opens = "" if form.is_bare else form.opens
    marks = CallMarks(opens, form.closes, form.separator, not request.use.is_single)
    functions = [tool["function"] for tool in request.tools]
    schema = _call_schema(functions, form.arguments, "#")
    return replace(sampling, grammar=answer_or_calls_grammar(answer, schema, marks))
