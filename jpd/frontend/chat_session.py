"""A chat of the Python API that remembers: each call is a turn of one conversation.

    chat = server.session()
    print(chat.say("Name three colours.").text)
    for delta in chat.stream("And three more?"):
        print(delta.text, end="")

A turn that fails, or a stream that is left before its end, changes nothing. One turn at a time.
Made by `jpd.api`.
"""

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from typing import TypeAlias, Unpack

from jpd.errors import RequestError
from jpd.frontend.backend import Backend
from jpd.frontend.conversation import Conversation
from jpd.frontend.loop_thread import LoopThread
from jpd.frontend.messages import ChatMessage
from jpd.frontend.options import ChatAsk, ChatOptions
from jpd.frontend.service import Generation, TextDelta
from jpd.frontend.tool_calls import ToolCallDelta, join_calls

MessagesLike: TypeAlias = str | Sequence[Mapping[str, object]]
"""What the user says, or messages as OpenAI's API has them: a system's too, or answers of tools."""

ReadAsk: TypeAlias = Callable[[Sequence[Mapping[str, object]], ChatOptions], ChatAsk]


class Session:
    """One conversation. Its turns go to the worker that holds their KV, while it is kept there.

    Methods raise what `Server.chat` raises. They may be called from any thread, their async twins
    from any event loop, one after the other.
    """

    def __init__(
        self, bridge: LoopThread, core: Backend, read: ReadAsk, conversation: Conversation
    ) -> None:
        self._bridge, self._core, self._read = bridge, core, read
        self._conversation = conversation

    @property
    def id(self) -> str:
        """The session id that the router knows it by."""
        return self._conversation.session_id

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """All that was said so far: dicts with role and content, and the calls of functions."""
        return self._conversation.messages

    def say(self, messages: MessagesLike, **options: Unpack[ChatOptions]) -> Generation:
        """One turn: the answer, whole."""
        return self._bridge.run(self._turn(*self._ask(messages, options)))

    async def asay(self, messages: MessagesLike, **options: Unpack[ChatOptions]) -> Generation:
        """The twin of `say`; cancelling it cancels the turn."""
        return await self._bridge.arun(self._turn(*self._ask(messages, options)))

    def stream(
        self, messages: MessagesLike, **options: Unpack[ChatOptions]
    ) -> Generator[TextDelta, None, None]:
        """One turn, as it comes. Leaving the iteration cancels it, and it is forgotten."""
        return self._bridge.iterate(self._deltas(*self._ask(messages, options)))

    def astream(
        self, messages: MessagesLike, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[TextDelta, None]:
        """The twin of `stream`."""
        return self._bridge.aiterate(self._deltas(*self._ask(messages, options)))

    async def _turn(self, new: Sequence[ChatMessage], ask: ChatAsk) -> Generation:
        [answer] = await self._core.generate(ask)
        self._conversation.add(self.id, new, answer.text, answer.tool_calls)
        return answer

    async def _deltas(
        self, new: Sequence[ChatMessage], ask: ChatAsk
    ) -> AsyncGenerator[TextDelta, None]:
        text, calls = list[str](), list[ToolCallDelta]()
        async with aclosing(self._core.stream(ask)) as deltas:
            async for delta in deltas:
                text.append(delta.text)
                calls.extend(delta.tool_calls)
                if delta.finish_reason is not None:
                    self._conversation.add(self.id, new, "".join(text), join_calls(calls))
                yield delta

    def _ask(
        self, messages: MessagesLike, options: ChatOptions
    ) -> tuple[Sequence[ChatMessage], ChatAsk]:
        """The new messages, and all of them as a question. Raises RequestError."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if options.get("n", 1) != 1:
            raise RequestError("n", options["n"], "a turn of a session has one answer")
        if not options.get("add_generation_prompt", True):
            rule = "the answer to a turn is a message of its own"
            raise RequestError("add_generation_prompt", False, rule)
        self._conversation.session_of_turn(options.get("session_id"))
        ask = self._read(messages, {**options, "session_id": self.id})
        return ask.messages, ask.after(self._conversation.messages)
