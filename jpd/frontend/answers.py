"""OpenAI's answer objects: whole ones as dicts, streamed ones as ready SSE bytes.

A streamed chunk is cut once for each request and choice, so that a token costs one JSON string and
one concatenation. Knows no transport and no router. Called by the HTTP routes.
"""

import dataclasses
import json
import time
from collections.abc import Iterable
from typing import Literal

from jpd.frontend.conversation import call_fields
from jpd.frontend.errors import Failure
from jpd.frontend.job import PreparedJob
from jpd.frontend.service import Generation, TextDelta
from jpd.frontend.token_texts import LogprobWriter, TokenTexts, prompt_entries
from jpd.frontend.tool_calls import ToolCallDelta
from jpd.request import Timeline

DONE_EVENT = b"data: [DONE]\n\n"

AnswerKind = Literal["completion", "chat"]
_OBJECTS = {
    "completion": ("cmpl", "text_completion", "text_completion"),
    "chat": ("chatcmpl", "chat.completion", "chat.completion.chunk"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How one answer is to look."""

    kind: AnswerKind
    request_id: str
    model: str
    include_usage: bool = False  # of a stream
    include_details: bool = False
    include_token_ids: bool = False
    num_logprobs: int | None = None  # alternatives for each token; None: no log-probabilities
    num_prompt_logprobs: int | None = None  # the same for the prompt, in vLLM's field
    token_texts: TokenTexts = TokenTexts(None)
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{_OBJECTS[self.kind][0]}-{self.request_id}"


class ChoiceLogprobs:
    """The fields `logprobs` and `prompt_logprobs` of one choice, whole or delta by delta."""

    def __init__(self, options: AnswerOptions, prepared: PreparedJob, index: int) -> None:
        self._options = options
        self._prompt = prepared.prompt_of(index)
        self._echo = prepared.job.echo
        self._writer = LogprobWriter(
            options.token_texts, options.num_logprobs or 0, prepared.job.skip_special_tokens
        )

    def fields(self, part: TextDelta | Generation) -> dict[str, object]:
        """What this part adds to the choice. Parts come in order."""
        options, found = self._options, dict[str, object]()
        if options.num_prompt_logprobs is not None and part.prompt_logprobs:
            found["prompt_logprobs"] = prompt_entries(
                options.token_texts,
                self._prompt.token_ids,
                part.prompt_logprobs,
                options.num_prompt_logprobs,
            )
        if options.num_logprobs is None or not part.logprobs:
            return {"logprobs": None} | found
        if options.kind == "chat":
            return {"logprobs": self._writer.chat(part.token_ids, part.logprobs)} | found
        shape: dict[str, list[object]] = {}
        if self._echo and part.prompt_logprobs:
            shape = self._writer.completion(self._prompt.token_ids, part.prompt_logprobs)
            self._writer.begin_output(self._prompt.text)
        for key, values in self._writer.completion(part.token_ids, part.logprobs).items():
            shape[key] = shape.get(key, []) + values
        return {"logprobs": shape} | found


class UsageCounter:
    """Counts what a job used, from its deltas or its whole choices."""

    def __init__(self, prepared: PreparedJob) -> None:
        self._prepared = prepared
        self.num_output_tokens = 0
        self.num_cached_tokens = 0

    def add(self, delta: TextDelta) -> None:
        self.num_output_tokens += len(delta.token_ids)
        if delta.timeline is not None:
            self.add_cached(delta.index, delta.timeline)

    def add_cached(self, index: int, timeline: Timeline) -> None:
        """A prompt counts once, and so does what was cached of it: by its first choice."""
        if index % self._prepared.job.n == 0:
            self.num_cached_tokens += timeline.num_cached_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._prepared.num_prompt_tokens

    def usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


def whole_answer(
    options: AnswerOptions, prepared: PreparedJob, generations: Iterable[Generation]
) -> dict[str, object]:
    """The body of a completion or chat completion that was not streamed."""
    counter = UsageCounter(prepared)
    choices = []
    for index, generation in enumerate(generations):
        counter.num_output_tokens += len(generation.token_ids)
        if generation.timeline is not None:
            counter.add_cached(index, generation.timeline)
        choices.append(_whole_choice(options, prepared, index, generation))
    return {
        "id": options.id,
        "object": _OBJECTS[options.kind][1],
        "created": options.created,
        "model": options.model,
        "choices": choices,
        "usage": counter.usage(),
    }


def _whole_choice(
    options: AnswerOptions, prepared: PreparedJob, index: int, generation: Generation
) -> dict[str, object]:
    choice: dict[str, object] = {"index": index}
    if options.kind == "chat":
        choice["message"] = _message(generation)
    else:
        choice["text"] = generation.text
    choice |= ChoiceLogprobs(options, prepared, index).fields(generation)
    choice["finish_reason"] = generation.finish_reason
    if options.include_token_ids:
        choice["prompt_token_ids"] = prepared.prompt_of(index).token_ids
        choice["token_ids"] = generation.token_ids
    if options.include_details and generation.timeline is not None:
        choice["details"] = details(generation.timeline)
    return choice


def _message(generation: Generation) -> dict[str, object]:
    return generation.as_message() | {"refusal": None}


def _chat_delta(delta: TextDelta) -> dict[str, object]:
    found: dict[str, object] = {"content": delta.text} if delta.text else {}
    if delta.tool_calls:
        found["tool_calls"] = [{"index": call.index} | _call(call) for call in delta.tool_calls]
    return found


def _call(call: ToolCallDelta) -> dict[str, object]:
    """A whole call or its first part; a later part has arguments only."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return call_fields(call)


def details(timeline: Timeline) -> dict[str, object]:
    """A timeline as clients see it."""
    values = dataclasses.asdict(timeline)
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in values.items()
    }


def error_event(failure: Failure) -> bytes:
    """The event of an answer that failed after its headers were sent."""
    return f"data: {json.dumps(failure.body())}\n\n".encode("ascii")


class ChunkWriter:
    """SSE bytes of one streamed answer; deltas come one by one from a single stream."""

    def __init__(self, options: AnswerOptions, prepared: PreparedJob) -> None:
        self._options = options
        self._prepared = prepared
        self._counter = UsageCounter(prepared)
        self._prefixes: dict[int, str] = {}  # by choice: all that stands before its text
        self._logprobs: dict[int, ChoiceLogprobs] = {}  # by choice, where they are asked for
        head = {
            "id": options.id,
            "object": _OBJECTS[options.kind][2],
            "created": options.created,
            "model": options.model,
        }
        self._head = "data: " + json.dumps(head, separators=(",", ":"))[:-1]
        usage = ',"usage":null' if options.include_usage else ""
        end = "}" if options.kind == "chat" else ""
        self._suffix = f'{end},"logprobs":null,"finish_reason":null}}]{usage}}}\n\n'

    def write(self, delta: TextDelta) -> bytes:
        """The chunks of one delta; b"" while its text is held back and nothing else is to say."""
        self._counter.add(delta)
        start = b""
        prefix = self._prefixes.get(delta.index)
        if prefix is None:
            key = '"delta":{"content":' if self._options.kind == "chat" else '"text":'
            prefix = f'{self._head},"choices":[{{"index":{delta.index},{key}'
            self._prefixes[delta.index] = prefix
            start = self._role(delta.index)
        has_more = bool(delta.logprobs or delta.prompt_logprobs or delta.tool_calls)
        if delta.finish_reason is not None or self._options.include_token_ids or has_more:
            return start + self._full(delta)
        if not delta.text:
            return start
        return start + f"{prefix}{json.dumps(delta.text)}{self._suffix}".encode("ascii")

    def usage(self) -> bytes:
        """The last chunk, without choices, if it was asked for."""
        if not self._options.include_usage:
            return b""
        tail = json.dumps({"choices": [], "usage": self._counter.usage()}, separators=(",", ":"))
        return f"{self._head},{tail[1:]}\n\n".encode("ascii")

    def _role(self, index: int) -> bytes:
        if self._options.kind != "chat":
            return b""
        delta = '"delta":{"role":"assistant","content":""'
        return f'{self._head},"choices":[{{"index":{index},{delta}{self._suffix}'.encode("ascii")

    def _logprob_fields(self, delta: TextDelta) -> dict[str, object]:
        if not delta.logprobs and not delta.prompt_logprobs:
            return {"logprobs": None}
        logprobs = self._logprobs.get(delta.index)
        if logprobs is None:
            logprobs = ChoiceLogprobs(self._options, self._prepared, delta.index)
            self._logprobs[delta.index] = logprobs
        return logprobs.fields(delta)

    def _full(self, delta: TextDelta) -> bytes:
        """A chunk with more than text in it: the end of a choice, or token ids."""
        choice: dict[str, object] = {"index": delta.index}
        if self._options.kind == "chat":
            choice["delta"] = _chat_delta(delta)
        else:
            choice["text"] = delta.text
        choice |= self._logprob_fields(delta)
        choice["finish_reason"] = delta.finish_reason
        if self._options.include_token_ids:
            choice["token_ids"] = delta.token_ids
        if self._options.include_details and delta.timeline is not None:
            choice["details"] = details(delta.timeline)
        chunk: dict[str, object] = {"choices": [choice]}
        if self._options.include_usage:
            chunk["usage"] = None
        tail = json.dumps(chunk, separators=(",", ":"))
        return f"{self._head},{tail[1:]}\n\n".encode("ascii")
