"""How families of models write calls of functions into their text.

A format says what stands before, between and after calls; the calls themselves are JSON in all of
them. Chosen by `--tool-call-parser`, or from what the model's chat template writes. Read by
`tool_calls`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_JSON = re.compile(r"\s*(?=[{\[])()")
_NAME_OR_JSON = re.compile(
    r"\s*(?:([\w.-]{1,64})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)|(?=[{\[]))"
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Where calls stand in a text; `head` is what may precede the JSON, a name as its group 1."""

    opens: str
    closes: str = ""
    separator: str = ""
    is_bare: bool = False  # also a JSON object at the start of the text, or after a call
    head: re.Pattern[str] = _JSON
    arguments: str = "arguments"  # their key in the JSON, as models of the format write it
    is_text: bool = True  # its marks are plain text, which a grammar can ask for
    names_first: bool = False  # a name may stand before the JSON, which is its arguments
    id_prefix: str = "call_"
    num_id_digits: int = 24


FORMATS: Mapping[str, ToolFormat] = {
    # <tool_call>{"name": "f", "arguments": {}}</tool_call>, also of Qwen
    "hermes": ToolFormat("<tool_call>", closes="</tool_call>"),
    # {"name": "f", "parameters": {}}; {...}
    "llama3": ToolFormat("<|python_tag|>", separator=";", is_bare=True, arguments="parameters"),
    # [TOOL_CALLS][{"name": "f", "arguments": {}}, ...], later [TOOL_CALLS]f[ARGS]{}
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        head=_NAME_OR_JSON,
        names_first=True,
        is_text=False,
        id_prefix="",
        num_id_digits=9,
    ),
}

GUIDED_LIST = ToolFormat("[", closes="]", separator=",")
"""What the grammar of `required` makes, whatever the model is used to."""


def format_of_template(template: str | None) -> str | None:
    """The format that a chat template writes calls of earlier turns in, if it is one of ours."""
    if template is None or "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return "llama3"
    return None
