"""The text of a sequence → text to show and calls of functions, as it comes.

A call is handed out when its JSON is complete and names a function that was offered; until then its
text is held. What turns out to be no such call is text: nothing the model said is lost.
Knows no transport. Called by TextService, once for each sequence.
"""

import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from jpd.frontend.tool_formats import ToolFormat

MAX_HEAD_CHARS = 200
"""Of what may stand between the mark of a call and its JSON."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is added to call `index`; its first delta has id and name, most are whole calls."""

    index: int
    id: str | None
    name: str | None
    arguments: str  # JSON, or the next part of it


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How calls are found in the answers of one job."""

    names: frozenset[str]  # of the functions that are offered
    format: ToolFormat
    forced: str | None = None  # the answer is the arguments of this one
    is_single: bool = False  # one call at most


@dataclass(slots=True)
class Found:
    """What one piece of text adds."""

    text: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class CallReader(Protocol):
    """`push` takes text as it comes, `finish` follows the last of it."""

    num_calls: int

    def push(self, text: str) -> Found: ...

    def finish(self) -> Found: ...


def open_reader(use: ToolUse) -> CallReader:
    """For one sequence."""
    if use.forced is not None:
        return ForcedCall(use.forced, use.format)
    return CallFinder(use)


class ForcedCall:
    """All of the text is arguments of one function, which a grammar sees to."""

    def __init__(self, name: str, format: ToolFormat) -> None:
        self._name, self._format = name, format
        self.num_calls = 0

    def push(self, text: str) -> Found:
        if not text:
            return Found()
        is_first = self.num_calls == 0
        self.num_calls = 1
        if is_first:
            return Found(calls=[ToolCallDelta(0, make_call_id(self._format), self._name, text)])
        return Found(calls=[ToolCallDelta(0, None, None, text)])

    def finish(self) -> Found:
        return Found()


class _Place(Enum):
    START = "before any text"
    TEXT = "in text"
    CALL = "behind the mark of a call"
    AFTER = "behind a call"


class CallFinder:
    """Calls wherever the format has them."""

    def __init__(self, use: ToolUse) -> None:
        self._use, self._format = use, use.format
        self._place = _Place.START
        self._held = ""  # not given out yet
        self._body = 0  # in a call: where its head begins in `_held`
        self._extent: JsonExtent | None = None
        self._name: str | None = None  # when it stands before the JSON
        self.num_calls = 0

    def push(self, text: str) -> Found:
        self._held += text
        found = Found()
        steps = {
            _Place.START: self._start,
            _Place.TEXT: self._text,
            _Place.CALL: self._call,
            _Place.AFTER: self._after,
        }
        while self._held and steps[self._place](found):
            pass
        return found

    def finish(self) -> Found:
        """What was held back: text, but for the space around calls."""
        held, self._held = self._held, ""
        return Found("" if self.num_calls and not held.strip() else held)

    # Each step gives out what it can, and says whether another one may do more.

    def _start(self, found: Found) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        if self._format.is_bare and text[0] == "{":
            return self._enter_call(len(self._held) - len(text))
        self._place = _Place.TEXT
        return True

    def _text(self, found: Found) -> bool:
        mark = self._format.opens
        at = self._held.find(mark)
        is_call = at >= 0
        if not is_call:
            at = len(self._held) - _num_begun(self._held, mark)
        shown = self._held[:at].rstrip()  # space before a call is not shown
        found.text += shown
        self._held = self._held[len(shown) :]
        return is_call and self._enter_call(at - len(shown) + len(mark))

    def _enter_call(self, body: int) -> bool:
        self._place, self._body, self._extent = _Place.CALL, body, None
        return True

    def _call(self, found: Found) -> bool:
        if self._extent is None:
            match = self._format.head.match(self._held, self._body)
            if match is None:
                return not self._may_be_head() and self._give_up(found, self._body)
            self._name = match[1] or None
            self._body = match.end()
            self._extent = JsonExtent(self._body)
        end = self._extent.find(self._held)
        if end is None:
            return False
        calls = read_calls(self._held[self._body : end], self._name, self._use.names)
        if not calls or (self._use.is_single and len(calls) + self.num_calls > 1):
            return self._give_up(found, end)
        for name, arguments in calls:
            call_id = make_call_id(self._format)
            found.calls.append(ToolCallDelta(self.num_calls, call_id, name, arguments))
            self.num_calls += 1
        self._held, self._place = self._held[end:], _Place.AFTER
        return True

    def _may_be_head(self) -> bool:
        head = self._held[self._body :].lstrip()
        if not head:
            return True
        is_word = head[0].isalnum() or head[0] == "_"
        return self._format.names_first and is_word and len(head) <= MAX_HEAD_CHARS

    def _give_up(self, found: Found, end: int) -> bool:
        """It was no call: all up to `end` is text."""
        found.text += self._held[:end]
        self._held, self._place = self._held[end:], _Place.TEXT
        return True

    def _after(self, found: Found) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        closes, separator = self._format.closes, self._format.separator
        if closes and text.startswith(closes):
            self._held, self._place = text[len(closes) :], _Place.TEXT
            return True
        if separator and text.startswith(separator):
            return self._enter_call(len(self._held) - len(text) + len(separator))
        if closes.startswith(text):  # so far
            return False
        if self._format.is_bare and text[0] == "{":
            return self._enter_call(len(self._held) - len(text))
        self._place = _Place.TEXT
        return True


class JsonExtent:
    """Finds the end of an object or list in text that grows, reading each character once."""

    def __init__(self, start: int) -> None:
        self._at = start
        self._depth = 0
        self._in_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """Where the value that began at the start ends; None while it has not."""
        for position in range(self._at, len(text)):
            character = text[position]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._at = position + 1
                    return self._at
        self._at = len(text)
        return None


def read_calls(text: str, name: str | None, names: frozenset[str]) -> list[tuple[str, str]]:
    """Names and arguments, as JSON, of one call or a list of them; none unless all are right.

    `name` is of the function whose arguments `text` is; without it they are in the JSON.
    """
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
        if name is not None:
            value = {"name": name, "arguments": value}
        items = value if isinstance(value, list) else [value]
        return [_read_call(item, names) for item in items]
    except (ValueError, RecursionError):
        return []


def _read_call(item: object, names: frozenset[str]) -> tuple[str, str]:
    name = item.get("name") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(name, str) or name not in names:
        raise ValueError("no call of a function that was offered")
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):  # JSON in JSON
        arguments = json.loads(arguments, strict=False, parse_constant=_refuse_constant)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # a lone surrogate is a ValueError
    return name, written


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _num_begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def make_call_id(format: ToolFormat) -> str:
    """New; as long as templates of the format's models want it, which is nine for Mistral."""
    return format.id_prefix + uuid.uuid4().hex[: format.num_id_digits]


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Whole calls of their deltas."""
    calls: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        begun = calls.get(delta.index)
        if begun is None:
            calls[delta.index] = delta
        else:
            arguments = begun.arguments + delta.arguments
            calls[delta.index] = ToolCallDelta(delta.index, begun.id, begun.name, arguments)
    return tuple(calls.values())
