"""A chat that goes on for several turns: its messages so far, and the session they are of.

A turn is added with its answer when it has ended well; one that fails, is cancelled or is left
leaves nothing behind. Knows no server. Used by the gRPC door and by the sessions of the Python API.
"""

import uuid
from collections.abc import Iterable, Sequence

from jpd.errors import RequestError
from jpd.frontend.messages import ChatMessage, read_messages
from jpd.frontend.tool_calls import ToolCallDelta


class Conversation:
    """Messages in the order in which they were said. For one turn at a time."""

    def __init__(self, session_id: str | None = None, messages: Sequence[ChatMessage] = ()) -> None:
        """Without a `session_id` one is made up; `messages` were checked by `read_messages`."""
        self.session_id = uuid.uuid4().hex if session_id is None else session_id
        self.messages = tuple(messages)

    def session_of_turn(self, asked: str | None) -> str:
        """The session a turn is of; the first may ask for one. Raises RequestError."""
        if asked is None or asked == self.session_id:
            return self.session_id
        if self.messages:
            rule = f"this chat is of session {self.session_id!r}"
            raise RequestError("session_id", asked, rule)
        return asked

    def add(
        self,
        session_id: str,
        new: Sequence[ChatMessage],
        text: str,
        calls: Iterable[ToolCallDelta] = (),
    ) -> None:
        """A turn that has ended: what was said, and its answer with whole calls."""
        answer = read_messages([assistant_message(text, calls)])
        self.session_id, self.messages = session_id, (*self.messages, *new, *answer)


def assistant_message(text: str, calls: Iterable[ToolCallDelta] = ()) -> dict[str, object]:
    """An answer as a message of OpenAI's API, to be sent back with the next turn."""
    message: dict[str, object] = {"role": "assistant", "content": text}
    made = [call_fields(call) for call in calls]
    if made:
        message |= {"content": text or None, "tool_calls": made}
    return message


def call_fields(call: ToolCallDelta) -> dict[str, object]:
    """A call as OpenAI's API has it: a whole one, or its first part."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
