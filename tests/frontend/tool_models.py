"""A model that can call functions, functions, and what asks for them: for tests of tools."""

import dataclasses
from typing import Any

from jpd.frontend.tool_formats import FORMATS
from tests.frontend.fake_router import make_model, make_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments.city }}"
    "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "maxLength": 9}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {"name": "weather", "description": "of today", "parameters": PARAMETERS},
    },
]
USER = [{"role": "user", "content": "hi"}]
NAMED = {"type": "function", "function": {"name": "weather"}}
MODEL = dataclasses.replace(
    make_model(make_tokenizer(TEMPLATE), 2048), tool_format=FORMATS["hermes"]
)
SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "schema": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/A"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"A": {"type": "integer"}},
        }
    },
}
