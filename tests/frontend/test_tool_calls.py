"""Calls in text: every format, however the text is cut, and what is none stays text."""

import json

import pytest

from jpd.frontend.tool_calls import (
    CallFinder,
    Found,
    ToolCallDelta,
    ToolUse,
    join_calls,
    open_reader,
)
from jpd.frontend.tool_formats import FORMATS, GUIDED_LIST, format_of_template

NAMES = frozenset(("f", "weather.now"))
TRICKY = {"city": 'Zürich "}]</tool_call>; [TOOL_CALLS] \\', "n": [1, {"x": None}]}
TRICKY_JSON = json.dumps(TRICKY)
ESCAPED = json.dumps(json.dumps({"a": 1}))

RIGHT = [
    # format, text, text that is shown, calls
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [{"a": 1}]),
    (
        "hermes",
        f'Let me see.\n<tool_call>{{"name": "f", "arguments": {TRICKY_JSON}}}</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "f"}</tool_call>\n',
        "Let me see.",
        [TRICKY, {}],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [{"a": 1}]),  # no end
    ("hermes", '<tool_call>{"name": "f"}</tool_call> done', " done", [{}]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {ESCAPED}}}</tool_call>', "", [{"a": 1}]),
    ("llama3", f'{{"name": "f", "parameters": {TRICKY_JSON}}}', "", [TRICKY]),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {}}', "", [{}]),
    (
        "llama3",
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "f", "arguments": {"b": "a\nb"}}',
        "",
        [{"a": 1}, {"b": "a\nb"}],
    ),
    ("llama3", '{"name": "f"}\n{"name": "f"}\n', "", [{}, {}]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {TRICKY_JSON}}}, '
        '{"name": "f", "arguments": {}}]',
        "",
        [TRICKY, {}],
    ),
    ("mistral", f"So:[TOOL_CALLS]f{TRICKY_JSON}[TOOL_CALLS]f[ARGS]{{}}", "So:", [TRICKY, {}]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [{"a": 1}]),
    (
        "list",
        '[{"name":"f","arguments":{"a":1}},\n {"name":"f","arguments":{}}]',
        "",
        [{"a": 1}, {}],
    ),
]

WRONG = [
    ("hermes", "nothing of the kind <tool"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),  # cut off
    ("hermes", '<tool_call>{"name": "f", "arguments": {a: 1}}</tool_call> and on'),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("hermes", "a \n<tool_call>\n f() </tool_call>  "),
    ("hermes", "<tool_call>" + "[" * 100_000 + "]" * 100_000),
    ("llama3", '{"answer": 5}; {"x": 1} '),
    ("llama3", 'a {"name": "f", "parameters": {}}'),  # the format has calls at the start only
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]f g{}"),
    ("mistral", "[TOOL_CALLS] " + "word" * 100),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, 5]'),
    ("mistral", "[TOOL_CALLS][]"),
    ("list", '[{"name":"f","argum'),
]


def use(name: str, is_single: bool = False) -> ToolUse:
    form = GUIDED_LIST if name == "list" else FORMATS[name]
    return ToolUse(NAMES, form, is_single=is_single)


def read(how: ToolUse, *texts: str) -> Found:
    reader = open_reader(how)
    parts = [reader.push(text) for text in texts] + [reader.finish()]
    return Found("".join(part.text for part in parts), [c for part in parts for c in part.calls])


def arguments(found: Found) -> list[object]:
    return [json.loads(call.arguments) for call in found.calls]


def cuts(text: str) -> list[tuple[str, ...]]:
    """Whole, in two everywhere, and letter by letter."""
    return [(text,), *((text[:at], text[at:]) for at in range(1, min(len(text), 300))), tuple(text)]


@pytest.mark.parametrize(("name", "text", "shown", "expected"), RIGHT)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, shown: str, expected: list[object]
) -> None:
    for pieces in cuts(text):
        found = read(use(name), *pieces)
        assert (found.text, arguments(found)) == (shown, expected), pieces
        assert [call.index for call in found.calls] == list(range(len(expected)))
        assert {call.name for call in found.calls} == {"f"}
        assert len({call.id for call in found.calls}) == len(expected)


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_what_is_no_call_is_text_to_the_letter(name: str, text: str) -> None:
    for pieces in cuts(text) if len(text) < 1000 else [(text,)]:
        found = read(use(name), *pieces)
        assert (found.text, found.calls) == (text, []), pieces


def test_a_broken_call_does_not_hide_the_next() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    broken = '<tool_call>{"name": f}</tool_call>'
    found = read(use("hermes"), f"a {broken} b {good} c")
    assert found.text == f"a {broken} b c" and arguments(found) == [{}]


def test_a_single_call_is_all_that_one_asks_for() -> None:
    one, two = '{"name": "f"}', '{"name": "f", "parameters": {"a": 2}}'
    found = read(use("llama3", is_single=True), f"{one};{two}")
    assert arguments(found) == [{}] and found.text == f";{two}"


def test_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    reader = CallFinder(use("hermes"))
    assert reader.push("Hello").text == "Hello"
    assert reader.push(" <tool").text == ""
    assert reader.push("box>").text == " <toolbox>"
    assert reader.push('<tool_call>{"name": "f"').calls == []
    assert len(reader.push("}").calls) == 1  # before the mark of its end


def test_a_forced_call_streams_its_arguments() -> None:
    reader = open_reader(ToolUse(NAMES, GUIDED_LIST, forced="f"))
    deltas = [call for text in ('{"a"', "", ":1}") for call in reader.push(text).calls]
    assert [(call.name, call.arguments) for call in deltas] == [("f", '{"a"'), (None, ":1}")]
    [whole] = join_calls(deltas)
    assert whole == ToolCallDelta(0, deltas[0].id, "f", '{"a":1}')


def test_ids_are_of_the_length_that_templates_check() -> None:
    [call] = read(use("mistral"), "[TOOL_CALLS]f{}").calls
    assert call.id is not None and len(call.id) == 9 and call.id.isalnum()
    [call] = read(use("hermes"), '<tool_call>{"name": "f"}').calls
    assert call.id is not None and call.id.startswith("call_")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for t in tools %}<tool_call>{% endfor %}", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("<|start_header_id|>{{ tools }}", "llama3"),
        ("{{ tools }}", None),
        ("<|start_header_id|>", None),  # of Llama 3.0, which knows of no tools
        (None, None),
    ],
)
def test_the_template_says_which_format(template: str | None, name: str | None) -> None:
    assert format_of_template(template) == name
