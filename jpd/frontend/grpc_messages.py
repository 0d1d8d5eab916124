"""jpd.v1 messages ↔ the text layer's own types.

Knows the generated message classes, no server. Called by `grpc_servicer` and `grpc_chat`.
Protobuf checks no ranges, so everything goes through the same rules as HTTP.
"""

import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from google.protobuf.message import Message

from jpd.errors import RequestError
from jpd.frontend.answers import UsageCounter, details
from jpd.frontend.grpc_calls import Context
from jpd.frontend.job import GenerateJob, PreparedJob, read_sampling
from jpd.frontend.messages import ChatMessage, read_messages
from jpd.frontend.prompts import Prompt, ServedModel
from jpd.frontend.service import TextDelta, TextService
from jpd.frontend.spans import read_trace_context
from jpd.frontend.tool_calls import ToolCallDelta
from jpd.frontend.tool_fields import Tool, ToolRequest, read_tool_request, read_tools, with_grammar
from jpd.request import Timeline, TokenLogprobs
from jpd.rpc import jpd_pb2

FINISH_REASONS = {
    None: jpd_pb2.FINISH_REASON_UNSPECIFIED,
    "stop": jpd_pb2.FINISH_REASON_STOP,
    "length": jpd_pb2.FINISH_REASON_LENGTH,
    "tool_calls": jpd_pb2.FINISH_REASON_TOOL_CALLS,
}
_OPTIONAL_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logprobs", "prompt_logprobs"),
)


async def read_job(
    message: jpd_pb2.GenerateRequest,
    service: TextService,
    context: Context,
    earlier: Sequence[ChatMessage] = (),
) -> GenerateJob:
    """The job of a Generate call, or of a turn that follows `earlier` messages.

    Raises RequestError; renders a chat template in a thread.
    """
    arrival_time = time.monotonic()
    service.model.check_name(message.model or None)
    prompt: Prompt
    tools: ToolRequest | None = None
    match message.WhichOneof("prompt"):
        case "text":
            prompt = message.text
        case "token_ids":
            prompt = tuple(message.token_ids.ids)
        case "chat":
            tools = _read_tool_request(message.chat, service.model)
            offered = () if tools is None else tools.tools
            messages = (*earlier, *read_chat(message.chat))
            prompt = await service.chat_prompt(messages, begins_answer(message.chat), offered)
        case _:
            raise RequestError("prompt", None, "give text, token_ids or chat")
    is_chat = message.WhichOneof("prompt") == "chat"
    if is_chat and message.echo:
        raise RequestError("echo", True, "is for text and token_ids")
    fields = _sampling_fields(message.sampling)
    return GenerateJob(
        prompts=(prompt,),
        sampling=with_grammar(read_sampling(fields, service.model.default_sampling), tools),
        n=message.n or 1,
        echo=message.echo,
        include_stop_str_in_output=message.include_stop_str_in_output,
        # Calls are found by marks that are special tokens of some models.
        skip_special_tokens=_given(message, "skip_special_tokens", True) and tools is None,
        add_special_tokens=_given(message, "add_special_tokens", not is_chat),
        session_id=message.session_id or None,
        cache_salt=message.cache_salt or None,
        prefill_worker=message.prefill_worker or None,
        decode_worker=message.decode_worker or None,
        priority=message.priority,
        slo=message.slo or None,
        timeout_seconds=context.time_remaining(),
        arrival_time=arrival_time,
        tools=None if tools is None else tools.use,
        trace_context=read_trace_context(dict(context.invocation_metadata() or ()).get),
    )


def _given(message: Message, name: str, default: bool) -> bool:
    return bool(getattr(message, name)) if message.HasField(name) else default


def begins_answer(chat: jpd_pb2.ChatMessages) -> bool:
    """Whether the template begins a message of the assistant behind the last one."""
    return _given(chat, "add_generation_prompt", True)


def read_chat(chat: jpd_pb2.ChatMessages) -> tuple[ChatMessage, ...]:
    """Checked messages. Raises RequestError."""
    return read_messages([_message_fields(message) for message in chat.messages])


def _message_fields(message: jpd_pb2.ChatMessage) -> dict[str, object]:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if calls:
        fields["tool_calls"] = calls
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name:
        fields["name"] = message.name
    return fields


def read_chat_tools(chat: jpd_pb2.ChatMessages) -> tuple[Tool, ...]:
    """The functions offered. Raises RequestError."""
    return read_tools([_tool_fields(index, tool) for index, tool in enumerate(chat.tools)])


def _tool_fields(index: int, tool: jpd_pb2.Tool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        try:
            function["parameters"] = json.loads(tool.parameters)
        except (ValueError, RecursionError) as error:
            field = f"tools[{index}].function.parameters"
            raise RequestError(field, tool.parameters, f"must be a JSON schema: {error}") from None
    return {"type": "function", "function": function}


def _read_tool_request(chat: jpd_pb2.ChatMessages, model: ServedModel) -> ToolRequest | None:
    choice: object = None
    match chat.WhichOneof("tool_choice"):
        case "no_tool":
            choice = "none" if chat.no_tool else None
        case "any_tool":
            choice = "required" if chat.any_tool else None
        case "named_tool":
            choice = {"type": "function", "function": {"name": chat.named_tool}}
    return read_tool_request(read_chat_tools(chat), choice, not chat.single_tool_call, model)


def _sampling_fields(message: jpd_pb2.SamplingParams) -> dict[str, object]:
    fields: dict[str, object] = {
        name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)
    }
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    fields["logit_bias"] = dict(message.logit_bias)
    fields["stop"] = tuple(message.stop)
    fields["stop_token_ids"] = tuple(message.stop_token_ids)
    fields["ignore_eos"] = message.ignore_eos
    fields["num_speculative_tokens"] = message.num_speculative_tokens
    match message.WhichOneof("guided"):
        case None:
            pass
        case "choice":
            fields["structured_outputs"] = {"choice": tuple(message.choice.texts)}
        case "json_schema":
            fields["structured_outputs"] = {"json": message.json_schema}
        case name:
            fields["structured_outputs"] = {name: getattr(message, name)}
    return fields


async def answer_messages(
    service: TextService, prepared: PreparedJob, include_details: bool
) -> AsyncGenerator[tuple[TextDelta, jpd_pb2.GenerateResponse], None]:
    """Deltas as they come, each with its message; the last one has the usage."""
    counter = UsageCounter(prepared)
    num_running = prepared.num_choices
    async with aclosing(service.stream(prepared)) as deltas:
        async for delta in deltas:
            counter.add(delta)
            message = delta_message(delta, include_details)
            num_running -= delta.finish_reason is not None
            if num_running == 0:
                message.usage.CopyFrom(usage_message(counter))
            yield delta, message


def delta_message(delta: TextDelta, include_details: bool) -> jpd_pb2.GenerateResponse:
    """One message of the stream, without usage."""
    message = jpd_pb2.GenerateResponse(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=map(_logprobs_message, delta.logprobs),
        prompt_logprobs=[
            _logprobs_message(entry) for entry in delta.prompt_logprobs if entry is not None
        ],
        tool_calls=map(_call_message, delta.tool_calls),
    )
    if delta.finish_reason is not None:
        message.finish_reason = FINISH_REASONS[delta.finish_reason]
        if include_details and delta.timeline is not None:
            message.timeline.CopyFrom(jpd_pb2.Timeline(**dataclasses.asdict(delta.timeline)))
    return message


def _logprobs_message(entry: TokenLogprobs) -> jpd_pb2.TokenLogprobs:
    return jpd_pb2.TokenLogprobs(
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _call_message(call: ToolCallDelta) -> jpd_pb2.ToolCallDelta:
    return jpd_pb2.ToolCallDelta(
        index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments
    )


def usage_message(counter: UsageCounter) -> jpd_pb2.Usage:
    return jpd_pb2.Usage(
        num_prompt_tokens=counter.num_prompt_tokens,
        num_output_tokens=counter.num_output_tokens,
        num_cached_tokens=counter.num_cached_tokens,
    )


def timeline_trailer(index: int, timeline: Timeline) -> str:
    """A timeline as the value of a trailer: ASCII JSON on one line."""
    return json.dumps({"index": index} | details(timeline))


def model_info(model: ServedModel) -> jpd_pb2.ModelInfo:
    tokenizer = model.tokenizer
    return jpd_pb2.ModelInfo(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
    )
