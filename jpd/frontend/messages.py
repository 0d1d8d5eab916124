"""Chat messages as clients send them → checked → as a chat template wants them.

Text parts are joined without anything between them, `developer` is read as `system`, and arguments
of earlier calls, which the API has as JSON in a text, become objects. Every refusal names the field
and the rule. Called by the doors.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jpd.errors import RequestError
from jpd.frontend.prompts import check_text

ChatMessage = Mapping[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_KEYS_OF_ALL = ("role", "content", "name")
_KEYS_OF_ROLES = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}
_KNOWN_KEYS = {
    *_KEYS_OF_ALL,
    *("tool_calls", "tool_call_id", "refusal", "audio", "function_call"),
}


def read_messages(value: object) -> tuple[ChatMessage, ...]:
    """Messages of a conversation. Raises RequestError."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise RequestError("messages", value, "must be a non-empty list of messages")
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _message(field: str, value: object) -> ChatMessage:
    if not isinstance(value, Mapping):
        raise RequestError(field, value, "must be an object with role and content")
    role = value.get("role")
    for key, item in value.items():
        if key not in _KNOWN_KEYS:
            raise RequestError(f"{field}.{key}", item, "is not a field of a chat message")
        if key not in _KEYS_OF_ALL and key not in _KEYS_OF_ROLES.get(str(role), ()) and item:
            raise RequestError(f"{field}.{key}", item, "is not supported")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{field}.role", role, f"must be one of {', '.join(_ROLES)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = value.get("tool_calls") if role == "assistant" else None
    content = value.get("content")
    message["content"] = "" if calls and content is None else _content(f"{field}.content", content)
    if value.get("name") is not None:
        message["name"] = check_text(f"{field}.name", value["name"])
    if calls:
        message["tool_calls"] = _calls(f"{field}.tool_calls", calls)
    if role == "tool":
        name = f"{field}.tool_call_id"
        message["tool_call_id"] = check_text(name, value.get("tool_call_id"), may_be_empty=False)
    return message


def _content(field: str, value: object) -> str:
    if isinstance(value, str):
        return check_text(field, value)
    if not isinstance(value, Sequence) or isinstance(value, bytes) or not value:
        raise RequestError(field, value, "must be a text or a list of text parts")
    return "".join(_part(f"{field}[{index}]", part) for index, part in enumerate(value))


def _part(field: str, value: object) -> str:
    if not isinstance(value, Mapping):
        raise RequestError(field, value, 'must be an object like {"type": "text", "text": ...}')
    if value.get("type") != "text":
        raise RequestError(f"{field}.type", value.get("type"), 'only "text" parts are supported')
    return check_text(f"{field}.text", value.get("text"))


def _calls(field: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(field, value, "must be a list of calls")
    return [_call(f"{field}[{index}]", item) for index, item in enumerate(value)]


def _call(field: str, value: object) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(function, Mapping):
        rule = 'must be an object like {"id": ..., "type": "function", "function": {...}}'
        raise RequestError(field, value, rule)
    if value.get("type", "function") != "function":
        raise RequestError(f"{field}.type", value.get("type"), 'must be "function"')
    inner = f"{field}.function"
    name = check_text(f"{inner}.name", function.get("name"), may_be_empty=False)
    arguments = _arguments(f"{inner}.arguments", function.get("arguments"))
    call_id = check_text(f"{field}.id", value.get("id"), may_be_empty=False)
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _arguments(field: str, value: object) -> object:
    """As an object; text that is none, which a model may have made, stays as it is."""
    if isinstance(value, Mapping):
        return value
    text = check_text(field, value)
    try:
        read = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return read if isinstance(read, dict) else text
